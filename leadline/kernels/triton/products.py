"""Matrix products inside kernels whose one operand is float32."""

from __future__ import annotations

import triton
import triton.language as tl

from leadline.kernels.triton.formats import dot_bf16, to_bf16


@triton.jit
def dot_parts(x, weight, sums, PARTS: tl.constexpr):
    """``sums + x @ weight``, x bf16 and weight the sum of PARTS bf16 terms of 8 bits each.

    One term is all of a bf16 weight; two keep 16 bits of a float32 one, three all 24.
    """
    for _ in tl.static_range(PARTS):
        term = to_bf16(weight.to(tl.float32))
        sums = dot_bf16(x, term, sums)
        weight = weight.to(tl.float32) - term.to(tl.float32)
    return sums
