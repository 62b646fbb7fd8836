"""RMSNorm."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leadline.kernels.cpu.jit import F1, F2, in_float32, kernel
from leadline.kernels.reference import norm


@in_float32(norm.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """One pass for the statistic, one for the product."""
    out = np.empty(x.shape, np.float32)
    _rms_norm(x, weight, eps, out)
    return torch.from_numpy(out)


@kernel
def _rms_norm(x: F2, weight: F1, eps: float, out: F2) -> None:
    rows, width = x.shape
    for r in range(rows):
        total = np.float32(0)
        for i in range(width):
            total += x[r, i] * x[r, i]
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            out[r, i] = weight[i] * (x[r, i] * scale)
