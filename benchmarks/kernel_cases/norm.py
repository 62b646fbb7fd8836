"""RMS norm (kernels.md 4)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from benchmarks.kernel_cases.case import Case, Rate, within
from leadline.kernels.reference import norm as reference
from leadline.kernels.triton import norm

WIDTH = 5120


def _make(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, WIDTH, device=device, dtype=torch.bfloat16)
    return x, torch.rand(WIDTH, device=device) + 0.5


CASES = [
    Case(
        kernel="4",
        op="rms_norm",
        shape=f"T={rows}",
        make=functools.partial(_make, rows),
        fused=functools.partial(norm.rms_norm, eps=1e-20),
        twin=functools.partial(reference.rms_norm, eps=1e-20),
        check=within(2e-3),
        bytes=rows * 4 * WIDTH + 4 * WIDTH,
        rate=Rate.FP32,
        flops=4 * rows * WIDTH,
        target_share=0.8 if rows >= 1024 else None,
    )
    for rows in (1, 64, 8192)
]
