"""Products of index queries with packed keys, and their sums over heads (kernels.md 5.2)."""

from __future__ import annotations

import triton
import triton.language as tl

from leadline.kernels.triton.formats import decode_e2m1, decode_ue8m0, dot_bf16, to_bf16
from leadline.kernels.triton.fp8_operands import (
    expand_rows,
    fold_rows,
    relu_product,
    split_channels,
)


@triton.jit
def query_operand(
    q,
    weights,
    first,
    num_rows,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    FP8: tl.constexpr,
):
    """All heads of ROWS rows as the columns of a right operand, and their weights in float32."""
    lane = tl.arange(0, ROWS * BLOCK_HEADS)
    head, row = lane % BLOCK_HEADS, first + lane // BLOCK_HEADS
    real = (head < HEADS) & (row < num_rows)
    at = row.to(tl.int64) * HEADS + head
    weight = tl.load(weights + at, mask=real, other=0.0).to(tl.float32)
    query = q + at[:, None] * DIM
    if FP8:
        channel = split_channels(DIM)[None, :]
        x = tl.load(query + channel, mask=real[:, None], other=0.0)
        x, power = fold_rows(x.to(tl.float32))
        weight *= power * 0.0001220703125  # 2^-13
    else:
        x = tl.load(query + tl.arange(0, DIM)[None, :], mask=real[:, None], other=0.0)
    return x.trans(), weight


@triton.jit
def key_operand(words, exponents, absent, DIM: tl.constexpr, FP8: tl.constexpr):
    """Packed keys ``[KEYS, DIM / 8]`` int32 as a left operand, and a power of two for each.

    The power is negative where ``absent`` ``[KEYS, DIM / 32]`` is 256, and not 0.
    """
    KEYS: tl.constexpr = words.shape[0]
    if FP8:
        # The ninth bit of an exponent becomes a sign.
        key, exponent = expand_rows(words, exponents.to(tl.int32) + absent)
        power = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        nibbles = words[:, :, None] >> (4 * tl.arange(0, 8)[None, None, :])
        key = decode_e2m1(nibbles).reshape(KEYS, DIM // 32, 32)
        key = to_bf16(key * decode_ue8m0(exponents)[:, :, None]).reshape(KEYS, DIM)
        power = tl.where(tl.max(absent, axis=1) > 0, -1.0, 1.0)
    return key, power


@triton.jit
def sum_heads(
    key,
    power,
    x,
    weight,
    ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    EXACT: tl.constexpr,
    FP8: tl.constexpr,
):
    """``[KEYS, ROWS]`` float32: the sum over heads of ``relu(q . k) w``; -inf where power < 0."""
    KEYS: tl.constexpr = key.shape[0]
    if FP8:
        dot = tl.dot(key, x)
    else:
        dot = dot_bf16(key, x, tl.zeros((KEYS, ROWS * BLOCK_HEADS), tl.float32))
    # Powers of two commute with roundings, so those of folded rows may be applied at the end.
    if EXACT and FP8:
        dot, weight = tl.broadcast(dot, weight.to(tl.bfloat16)[None, :])
        product = relu_product(dot, weight)
    elif EXACT:
        dot = to_bf16(dot).to(tl.float32)
        relu = tl.maximum(dot, 0.0, propagate_nan=tl.PropagateNan.ALL)
        product = to_bf16(relu * weight[None, :]).to(tl.float32)
    else:
        # Twice the relu, by an addition: maxima, and what expands the keys, share another pipe.
        product = (dot + tl.abs(dot)) * (0.5 * weight)[None, :]
    total = tl.sum(product.reshape(KEYS, ROWS, BLOCK_HEADS), axis=2)
    power = power[:, None]
    # NaN where the power is infinite.
    return tl.where(power < 0, -float("inf"), total * power + 0.0 * power)
