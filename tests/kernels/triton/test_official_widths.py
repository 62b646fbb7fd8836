"""Every case of ``benchmarks/kernel_cases`` on a GPU: kernels at official sizes are right."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernel_cases import CASES
from benchmarks.kernel_cases.case import Case
from benchmarks.kernels import error_of


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_its_definition(case: Case, seed: int) -> None:
    error_of(case, torch.device("cuda"), seed)
