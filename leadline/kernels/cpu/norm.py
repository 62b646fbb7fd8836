"""RMSNorm."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leadline.kernels.cpu.jit import F1, F2, Real, in_float32, inline_sums, kernel
from leadline.kernels.reference import norm


@inline_sums
def normalise_row(x: F1, weight: F1, eps: Real, out: F1) -> None:
    """RMSNorm of one row; ``out`` may be ``x``."""
    width, total = x.shape[0], np.float32(0)
    for i in range(width):
        total += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
    for i in range(width):
        out[i] = weight[i] * (x[i] * scale)


@in_float32(norm.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """One pass for the statistic, one for the product."""
    out = np.empty(x.shape, np.float32)
    _rms_norm(x, weight, eps, out)
    return torch.from_numpy(out)


@kernel
def _rms_norm(x: F2, weight: F1, eps: float, out: F2) -> None:
    for r in range(x.shape[0]):
        normalise_row(x[r], weight, eps, out[r])
