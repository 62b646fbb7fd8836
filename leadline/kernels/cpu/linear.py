"""Matrix products: torch's own, behind one pass of rounding."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from leadline.kernels.cpu.jit import in_float32
from leadline.kernels.cpu.quant import round_trip_fp8_32
from leadline.kernels.packed import Weight
from leadline.kernels.reference import linear as reference


@in_float32(reference.linear)
def linear(x: Tensor, weight: Weight) -> Tensor:
    """Rounds the input where the weight was packed."""
    if weight.quantizes_input:
        x = round_trip_fp8_32(x)
    return F.linear(x, weight.dense)
