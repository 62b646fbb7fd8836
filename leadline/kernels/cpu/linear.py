"""Matrix products: torch's own, behind one pass of rounding."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from leadline.kernels.cpu.jit import in_float32
from leadline.kernels.cpu.quant import round_rows_fp8
from leadline.kernels.packed import Weight
from leadline.kernels.reference import linear as reference


@in_float32(reference.linear)
def linear(x: Tensor, weight: Weight) -> Tensor:
    """Rounds the input where the weight was packed."""
    if weight.quantizes_input:
        x = round_rows_fp8(x, weight.input_block)
    return F.linear(x, weight.dense)
