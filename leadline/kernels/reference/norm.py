"""RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.kernels.reference.accumulate import widen


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """The weight is multiplied before the only rounding."""
    wide = widen(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale)).to(x.dtype)
