"""RMSNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from leadline.kernels.reference.accumulate import widen


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """The weight is multiplied before the only rounding."""
    return F.rms_norm(widen(x), x.shape[-1:], weight, eps).to(x.dtype)
