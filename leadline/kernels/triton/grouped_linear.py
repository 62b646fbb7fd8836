"""The output projection of attention: one matrix per group, then one for all (kernels.md 9)."""

from __future__ import annotations

from torch import Tensor

from leadline.kernels.packed import Weight
from leadline.kernels.reference import linear as reference
from leadline.kernels.triton.linear import as_group, is_fp8, linear
from leadline.kernels.triton.packed_matmul import chained_matmul, packed_matmul


def grouped_linear(x: Tensor, weight: Weight) -> Tensor:
    """Groups are blocks of one launch."""
    if not is_fp8(weight):
        return reference.grouped_linear(x, weight)
    groups = weight.shape[0]
    return packed_matmul(x, weight).unflatten(1, (groups, -1))


def output_projection(x: Tensor, wo_a: Weight, wo_b: Weight) -> Tensor:
    """The first product ends with what the second one wants of its input."""
    grouped = x.flatten(1).unflatten(1, (wo_a.shape[0], -1))
    if not (is_fp8(wo_a) and is_fp8(wo_b)):
        return linear(grouped_linear(grouped, wo_a).flatten(1), wo_b)
    return chained_matmul(grouped, wo_a, as_group(wo_b))
