"""Matrix products with plain or packed weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.kernels.packed import Weight
from leadline.kernels.reference.accumulate import widen
from leadline.kernels.reference.quant import round_trip_fp8


def linear(x: Tensor, weight: Weight) -> Tensor:
    """The product is taken in the weight's dtype: float32 on a CPU, so that sums are too."""
    if weight.quantizes_input:
        x = round_trip_fp8(x, weight.input_block)
    dense = weight.dense
    return F.linear(x.to(dense.dtype), dense).to(x.dtype)


def grouped_linear(x: Tensor, weight: Weight) -> Tensor:
    """``[m, G, in]`` by ``[G, out, in]``: one matrix per group."""
    dense = weight.dense
    product = torch.bmm(x.to(dense.dtype).transpose(0, 1), dense.transpose(1, 2))
    return product.transpose(0, 1).to(x.dtype)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The sum stays wide."""
    weight = widen(weight)
    return F.linear(x.to(weight.dtype), weight)
