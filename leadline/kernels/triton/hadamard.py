"""The Hadamard transform inside kernels, in the order of ``reference.hadamard``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _levels(n):
    return n.bit_length() - 1


@triton.jit
def hadamard(x):
    """Float32 ``[rows, n]``, n a power of two, each row transformed; not to be fused or reordered.

    Sums of the same two values as the definition's, so that what is rounded next is the same too.
    """
    rows: tl.constexpr = x.shape[0]
    n: tl.constexpr = x.shape[1]
    for level in tl.static_range(_levels(n)):
        half: tl.constexpr = 1 << level
        pairs = tl.permute(tl.reshape(x, [rows, n // (2 * half), 2, half]), (0, 1, 3, 2))
        low, high = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), [rows, n])
    return x * n**-0.5
