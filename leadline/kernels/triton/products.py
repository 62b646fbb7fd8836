"""Matrix products of bf16 inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from leadline.kernels.triton.formats import to_bf16
from leadline.kernels.triton.launch import INTERPRETED

_WIDENED = tl.constexpr(INTERPRETED)  # the interpreter multiplies the bits of bf16 as integers


@triton.jit
def dot(x, weight, acc):
    """``acc + x @ weight``, both bf16, the sum float32."""
    if _WIDENED:
        return tl.dot(x.to(tl.float32), weight.to(tl.float32), acc)
    return tl.dot(x, weight, acc)


@triton.jit
def dot_parts(x, weight, acc, PARTS: tl.constexpr):
    """``acc + x @ weight``, x bf16 and weight taken as the sum of PARTS bf16 terms of 8 bits each.

    One term is all of a bf16 weight; two keep 16 bits of a float32 one, three all 24.
    """
    for _ in tl.static_range(PARTS):
        term = to_bf16(weight.to(tl.float32))
        acc = dot(x, term, acc)
        weight = weight.to(tl.float32) - term.to(tl.float32)
    return acc
