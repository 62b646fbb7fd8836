"""What kernels take, and where they are kept."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

jit = pytest.importorskip("leadline.kernels.cpu.jit", reason="the extra 'cpu' is not installed")
F1 = jit.F1


def add_one(x: F1, out: F1) -> None:  # type: ignore[valid-type]
    for i in range(x.shape[0]):  # type: ignore[attr-defined]
        out[i] = x[i] + 1  # type: ignore[index]


def test_a_kernel_takes_tensors_with_gaps_and_refuses_other_types() -> None:
    kernel = jit.kernel(add_one)
    out = np.empty(3, np.float32)
    kernel(torch.arange(6.0)[::2], out)
    assert out.tolist() == [1, 3, 5]
    with pytest.raises(TypeError, match="No matching definition"):
        kernel(torch.arange(3), out)


def test_without_a_folder_kernels_are_compiled_at_every_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("there is no home")

    monkeypatch.setattr(jit, "_cache_folder", no_home)
    kernel = jit.kernel(add_one)
    out = np.empty(1, np.float32)
    kernel(torch.ones(1), out)
    assert out.tolist() == [2]
    assert (caplog.records[0].levelno, caplog.records[0].message) == (
        logging.WARNING,
        "add_one is compiled at every start: there is no home",
    )
