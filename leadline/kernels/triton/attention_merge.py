"""What ends a row of ``attention``: splits merged, the sink, and the rotation back."""

from __future__ import annotations

import triton
import triton.language as tl

from leadline.kernels.triton.formats import to_bf16
from leadline.kernels.triton.quant import store_fp8_32
from leadline.kernels.triton.unpack import UNIT

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finish(sums, top, total, sink, cos, sin, row, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Outputs ``[heads, WIDTH]``: divided by the denominator with the sink in it, rotated back."""
    bias = tl.minimum(sink * _LOG2_E, 1e30)
    highest = tl.maximum(top, bias)
    shrink = tl.exp2(top - highest)
    denominator = (total * shrink + tl.exp2(bias - highest)) * UNIT
    # Without a key and a sink there is none, and nothing to divide.
    factor = shrink / tl.where(denominator == 0, 1.0, denominator)
    turn_cos, turn_sin = angles(cos, sin, row, WIDTH, PAIRS)
    return to_bf16(rotate(sums * factor[:, None], turn_cos, -turn_sin))


@triton.jit
def log_sum(top, total):
    """What a running maximum of base 2 and its denominator stand for; -inf without keys."""
    return (top + tl.log2(total)) * _LN_2


@triton.jit
def angles(cos, sin, row, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Cosines and sines ``[1, WIDTH / 2]`` of all channel pairs; those in front do not turn."""
    pair = tl.arange(0, WIDTH // 2) - (WIDTH // 2 - PAIRS)
    at = row * PAIRS + pair
    turn_cos = tl.load(cos + at, mask=pair >= 0, other=1.0)
    turn_sin = tl.load(sin + at, mask=pair >= 0, other=0.0)
    return turn_cos[None, :], turn_sin[None, :]


@triton.jit
def rotate(x, turn_cos, turn_sin):
    """Adjacent channels of ``[n, WIDTH]`` as complex numbers, turned."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    turned = tl.join(even * turn_cos - odd * turn_sin, even * turn_sin + odd * turn_cos)
    return tl.reshape(turned, x.shape)


@triton.jit
def merge(
    partial,
    tops,
    totals,
    cos,
    sin,
    sink,
    out,
    lse,
    codes,
    exponents,
    num_splits,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of a row: the sums of all its splits."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + head
    channel = tl.arange(0, WIDTH)[None, :]
    split = tl.arange(0, BLOCK)
    inside = split < num_splits
    at = (row * num_splits + split) * tl.num_programs(1) + head
    tops_of_splits = tl.load(tops + at, mask=inside, other=-1e30)
    top = tl.max(tops_of_splits, axis=0, keep_dims=True)
    weights = tl.exp2(tops_of_splits - top)
    totals_of_splits = tl.load(totals + at, mask=inside, other=0.0)
    total = tl.sum(weights * totals_of_splits, axis=0, keep_dims=True)
    sums = tl.load(partial + at[:, None] * WIDTH + channel, mask=inside[:, None], other=0.0)
    sums = tl.sum(sums * weights[:, None], axis=0, keep_dims=True)
    bias = tl.load(sink + head)
    result = finish(sums, top, total, bias, cos, sin, row, WIDTH, PAIRS)
    tl.store(out + place * WIDTH + channel, result)
    if codes is not None:
        inside = tl.full([1, WIDTH // 32], True, tl.int1)
        store_fp8_32(result, codes, exponents, place * WIDTH + tl.arange(0, 1), inside)
    if lse is not None:
        tl.store(lse + place + tl.arange(0, 1), log_sum(top, total))
