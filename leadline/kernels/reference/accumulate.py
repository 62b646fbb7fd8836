"""The dtype in which sums are kept."""

from __future__ import annotations

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """``x`` in the accumulation dtype: float64 stays, anything narrower becomes float32."""
    return x if x.dtype == torch.float64 else x.float()
