"""RMS norm against its definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from leadline.kernels.reference import norm as reference
from leadline.kernels.triton import norm
from tests.kernels.bounds import few_differ


@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 64), (5, 96), (3, 1280), (70, 64)])
def test_rms_norm(device: torch.device, rows: int, width: int) -> None:
    x = 3 * torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    weight = torch.rand(width, device=device) + 0.5
    actual = norm.rms_norm(x, weight, eps=1e-20)
    wanted = reference.rms_norm(x, weight, eps=1e-20)
    torch.testing.assert_close(actual, wanted, rtol=2**-7, atol=0)
    assert few_differ(actual, wanted)


def test_broken_and_empty_rows_stay_alone(device: torch.device) -> None:
    x = torch.randn(3, 64, device=device, dtype=torch.bfloat16)
    x[0], x[2] = 0, torch.nan
    weight = torch.ones(64, device=device)
    actual = norm.rms_norm(x, weight, eps=1e-20)
    assert not actual[0].any()
    assert torch.equal(actual[1], norm.rms_norm(x[1:2], weight, eps=1e-20)[0])
