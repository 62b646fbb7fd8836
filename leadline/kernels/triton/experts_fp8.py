"""Routed experts with MXFP4 weights and E4M3 activations, many tokens per expert (kernels.md 10.3).

Five launches up to the pairs' rows: inputs quantised; ``expert_tiles``; gate and up with SwiGLU and
the routing weight; hidden rows quantised; down. Programs are numbered as in ``experts``.

One power of two a row is enough for activations, and the products need none inside: beside groups
of 32 channels it moves a row by 3.1e-4 of its length at most, whatever is in the row, where E4M3's
mantissa costs 2.6e-2 in both (``reference.quant.round_trip_fp8_row``). Groups of 512 or 128 could
not show. Weights lose nothing (``fp8_tiles``): a row of a tile is E5M2 and a power of two, which
is applied where the row's part is added.

Hopper's FP8 sums keep some 14 bits. Here they end after 128 channels, four instructions; what adds
these parts in float32 applies the power as well, as one fused multiplication. Parts of 512 would
save three of four of them, but would have to stay in registers, where only half as many sums would
fit, and activations would come from L2 twice as often.

Expanding eight weights takes 9 integer instructions, and multiplying them by 128 tokens takes the
tensor cores as long as 16. So a program that expands should leave them to another: to a second
program on the multiprocessor, or to the other warps of its own. Two parts, of a tile of gate rows
and one of up rows, or of two tiles of the matrix of down, share what is loaded of activations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.batch_invariance import planned_rows
from leadline.kernels.packed import PackedWeight
from leadline.kernels.triton.expert_tiles import sort_pairs, span
from leadline.kernels.triton.formats import to_bf16
from leadline.kernels.triton.fp8_tiles import SPAN, expand_tile, in_order, quantize_rows
from leadline.kernels.triton.launch import bucket, tuned
from leadline.kernels.triton.swiglu import clamped_swiglu

# Rows of a part are 16 a warp (``expand_tile``). Four warps leave room for a second program, which
# does the other thing; eight read activations from L2 half as often.
_tuned = tuned(
    [
        triton.Config({"ROWS": 16 * warps}, num_warps=warps, num_stages=stages)
        for warps, stages in ((4, 3), (4, 4), (8, 3), (8, 4))
    ],
    ["D", "F", "TILE", "batch"],
)


def pair_outputs(
    x: Tensor, ids: Tensor, weights: Tensor, w13: PackedWeight, w2: PackedWeight, *, limit: float
) -> Tensor:
    """Each expert's output for each of its rows, as ``ops.routed_experts`` with ``row_scales``.

    Args:
        x: ``[m, D]`` bf16, m at least 1.
        ids: ``[m, k]`` int64 in -1 .. E - 1.
        weights: ``[m, k]`` float32.
        w13: MXFP4 ``[E, 2 F, D]``, gate rows first.
        w2: MXFP4 ``[E, D, F]``.
        limit: of the clamp.

    Returns:
        ``[m k, D]`` bf16; rows of pairs with id -1 are not written.
    """
    num_pairs, per_row = ids.numel(), ids.shape[1]
    num_experts, width, hidden_width = w2.shape
    planned_pairs = planned_rows(ids.shape[0]) * per_row
    tile_size = _tile_size(planned_pairs // num_experts)
    tiles = sort_pairs(ids, num_experts=num_experts, tile_size=tile_size)
    capacity = len(tiles.spans)
    sizes = {"D": width, "F": hidden_width, "SPAN": SPAN, "TILE": tile_size}
    sizes["batch"] = bucket(planned_pairs)
    hidden = torch.empty(num_pairs, hidden_width, dtype=x.dtype, device=x.device)
    _gate_up[lambda meta: (capacity, triton.cdiv(hidden_width, meta["ROWS"]))](
        *quantize_rows(x),
        w13.codes,
        _scale_words(w13),
        weights.contiguous(),
        tiles.pairs,
        tiles.spans,
        hidden,
        limit,
        PER_ROW=per_row,
        **sizes,
    )
    outputs = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    _down[lambda meta: (capacity, triton.cdiv(width, 2 * meta["ROWS"]))](
        *quantize_rows(hidden, tiles.pairs),
        w2.codes,
        _scale_words(w2),
        tiles.pairs,
        tiles.spans,
        outputs,
        **sizes,
    )
    return outputs


def _tile_size(mean: int) -> int:
    """Pairs of a tile, from those of an expert if all are chosen alike.

    A tile's weights cost as much to expand as to multiply by some 80 tokens, so one tile an expert
    is best where that is possible.
    """
    return 64 if mean <= 48 else 128


def _scale_words(weight: PackedWeight) -> Tensor:
    """Its scales, four a word where rows have a multiple of four."""
    whole = weight.scales.shape[-1] % 4 == 0
    return weight.scales.view(torch.int32) if whole else weight.scales


@triton.jit
def _load_words(scales, rows, step, K: tl.constexpr, SPAN: tl.constexpr):
    """The four scale bytes of some rows' tile, zeros beyond a row's end."""
    if K % SPAN == 0:
        return tl.load(scales + rows * (K // SPAN) + step)
    words = tl.zeros_like(rows)
    for i in tl.static_range(4):
        at = step * 4 + i
        byte = tl.load(scales + rows * (K // 32) + at, mask=at < K // 32, other=0)
        words |= byte.to(tl.int32) << (8 * i)
    return words


@triton.jit
def _load_codes(codes, rows, step, K: tl.constexpr, SPAN: tl.constexpr):
    """Some rows' tile of codes, zeros beyond a row's end."""
    byte = step * (SPAN // 2) + tl.arange(0, SPAN // 2)
    at = codes + (rows * (K // 2))[:, None] + byte[None, :]
    if K % SPAN == 0:
        return tl.load(at)
    return tl.load(at, mask=(byte < K // 2)[None, :], other=0)


@triton.jit
def _add(total, codes, words, inputs):
    """``total + W x^T`` of one tile, which is as far as the tensor cores' own sums go.

    ``max_num_imprecise_acc`` stays at Triton's default, all channels of a product: that is the
    tile. With less, it would add parts of tiles in float32, at twice the price.
    """
    operand, power = expand_tile(codes, words)
    return total + tl.dot(operand, inputs) * power[:, None]


@triton.jit
def _two_products(
    codes,
    scales,
    before,
    first,
    second,
    inputs,
    powers,
    rows,
    live,
    K: tl.constexpr,
    SPAN: tl.constexpr,
):
    """``W x^T`` for two sets of rows of one of the matrices: ``[M, N]`` float32 twice.

    Args:
        codes: pointer to ``[.., K / 2]`` bytes.
        scales: pointer to what ``_scale_words`` makes of ``[.., K / 32]`` bytes.
        before: rows of the matrices before this one, int64.
        first: ``[M]`` rows of the matrix.
        second: ``[M]`` others.
        inputs: pointer to codes of ``quantize_rows``.
        powers: pointer to their powers.
        rows: ``[N]`` int64 rows of these.
        live: ``[N]`` bool; others are read as zeros, and cost no bandwidth.
        K: the products' length, a multiple of 32.
        SPAN: channels of a step.
    """
    M: tl.constexpr = first.shape[0]
    N: tl.constexpr = rows.shape[0]
    STEPS: tl.constexpr = (K + SPAN - 1) // SPAN
    codes += before * (K // 2)
    scales += before * (K // SPAN if K % SPAN == 0 else K // 32)
    inputs += (rows * (STEPS * SPAN))[:, None] + tl.arange(0, SPAN)[None, :]
    total = tl.zeros((M, N), tl.float32)
    other = tl.zeros((M, N), tl.float32)
    # A step ahead by hand: these loads are too small for the pipeline that fetches the others.
    words = _load_words(scales, first, 0, K, SPAN)
    other_words = _load_words(scales, second, 0, K, SPAN)
    for step in range(STEPS):
        tile = tl.load(inputs + step * SPAN, mask=live[:, None], other=0.0).T
        tile_codes = _load_codes(codes, first, step, K, SPAN)
        other_codes = _load_codes(codes, second, step, K, SPAN)
        following = tl.minimum(step + 1, STEPS - 1)
        next_words = _load_words(scales, first, following, K, SPAN)
        next_other_words = _load_words(scales, second, following, K, SPAN)
        total = _add(total, tile_codes, words, tile)
        other = _add(other, other_codes, other_words, tile)
        words, other_words = next_words, next_other_words
    power = tl.load(powers + rows, mask=live, other=0.0)[None, :]
    return in_order(total) * power, in_order(other) * power


@_tuned
@triton.jit
def _gate_up(
    inputs,
    powers,
    codes,
    scales,
    weights,
    pairs,
    spans,
    hidden,
    limit,
    batch,
    D: tl.constexpr,
    F: tl.constexpr,
    SPAN: tl.constexpr,
    PER_ROW: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Hidden columns of one tile of pairs; ``batch`` is a key of tuning only."""
    expert, first, size = span(spans, tl.program_id(0))
    if expert < 0:
        return
    place = first + tl.arange(0, TILE)
    live = tl.arange(0, TILE) < size
    pair = tl.load(pairs + place, mask=live, other=0)
    column = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(column, F - 1)
    rows = (pair // PER_ROW).to(tl.int64)
    gate, up = _two_products(
        *(codes, scales, expert * (2 * F), row, F + row, inputs, powers, rows, live, D, SPAN)
    )
    # The weight counts before the rounding (v41-model 5.3).
    weight = tl.load(weights + pair, mask=live, other=0.0).to(tl.float32)
    gate, up = to_bf16(gate).to(tl.float32), to_bf16(up).to(tl.float32)
    value = clamped_swiglu(gate, up, limit) * weight[None, :]
    at = place.to(tl.int64)[None, :] * F + column[:, None]
    tl.store(hidden + at, to_bf16(value), mask=(column < F)[:, None] & live[None, :])


@_tuned
@triton.jit
def _down(
    inputs,
    powers,
    codes,
    scales,
    pairs,
    spans,
    outputs,
    batch,
    D: tl.constexpr,
    F: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Output columns of one tile of pairs, each pair's row at its own place."""
    expert, first, size = span(spans, tl.program_id(0))
    if expert < 0:
        return
    place = first + tl.arange(0, TILE)
    live = tl.arange(0, TILE) < size
    column = tl.program_id(1) * (2 * ROWS) + tl.arange(0, ROWS)
    row, next_row = tl.minimum(column, D - 1), tl.minimum(column + ROWS, D - 1)
    rows = place.to(tl.int64)
    total, next_total = _two_products(
        *(codes, scales, expert * D, row, next_row, inputs, powers, rows, live, F, SPAN)
    )
    pair = tl.load(pairs + place, mask=live, other=0).to(tl.int64)
    at = pair[None, :] * D + column[:, None]
    tl.store(outputs + at, to_bf16(total), mask=(column < D)[:, None] & live[None, :])
    inside = (column + ROWS < D)[:, None] & live[None, :]
    tl.store(outputs + at + ROWS, to_bf16(next_total), mask=inside)
