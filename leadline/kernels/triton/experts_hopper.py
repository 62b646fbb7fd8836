"""Routed experts on Hopper, where an expert has some pairs (kernels.md 10.3).

Inputs are copied to where their pairs lie, sorted by expert, in the order of channels in which
``mxfp4_hopper`` multiplies: bulk copies take neighbours only. Launches: ``expert_tiles``; that
copy; gate and up with SwiGLU and the routing weight; the same copy of hidden rows, rounded to FP8;
down, which leaves one row per pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from leadline.kernels import batch_invariance
from leadline.kernels.batch_invariance import planned_rows
from leadline.kernels.packed import PackedWeight
from leadline.kernels.triton.expert_tiles import sort_pairs
from leadline.kernels.triton.launch import bucket
from leadline.kernels.triton.mxfp4_hopper import (
    CHANNELS,
    arrange,
    describe_codes,
    describe_inputs,
    multiply,
)
from leadline.kernels.triton.swiglu import clamped_swiglu


@dataclass(frozen=True, slots=True)
class _Tile:
    """What one program multiplies.

    Attributes:
        tokens: pairs at most.
        rows: of the weight.
        stages: of 128 channels, in shared memory.
        num_warps: that multiply.
    """

    tokens: int
    rows: int
    stages: int
    num_warps: int


# Inputs are twice as wide as codes are narrow, so large tiles of rows read them less often.
_TILES = (
    _Tile(16, 128, stages=4, num_warps=4),
    _Tile(32, 128, stages=4, num_warps=4),
    _Tile(64, 256, stages=6, num_warps=8),
    _Tile(128, 256, stages=4, num_warps=8),
)


def fits(w13: PackedWeight, w2: PackedWeight) -> bool:
    """Whether these stacks have widths that whole tiles divide."""
    _, width, words = w2.codes.shape
    return width % _TILES[-1].rows == 0 and 2 * words % CHANNELS == 0


def pair_outputs(
    x: Tensor, ids: Tensor, weights: Tensor, w13: PackedWeight, w2: PackedWeight, *, limit: float
) -> Tensor:
    """Each expert's output for each of its rows ``[m k, D]``; rows of id -1 are not written."""
    num_experts, width, words = w2.codes.shape
    hidden_width = 2 * words
    num_pairs, per_row = ids.numel(), ids.shape[1]
    tile = _tile(planned_rows(ids.shape[0]) * per_row // num_experts)
    tiles = sort_pairs(ids, num_experts=num_experts, tile_size=tile.tokens)
    # Tiles that are not full shrink, unless others' pairs must not change how one is multiplied.
    halvings = 0 if batch_invariance.switch.enabled else min(tile.tokens // 16 - 1, 2)
    options = {
        "HALVINGS": halvings,
        "TOKENS": tile.tokens,
        "ROWS": tile.rows,
        "STAGES": tile.stages,
        "num_warps": tile.num_warps,
    }
    capacity = len(tiles.spans)
    inputs = arrange(x, tiles.pairs, per_row, w13.input_block if w13.quantizes_input else 0)
    hidden = torch.empty(num_pairs, hidden_width, dtype=x.dtype, device=x.device)
    _gate_up[(triton.cdiv(2 * hidden_width, tile.rows), capacity)](
        *_inputs(inputs, tile, halvings),
        describe_codes(w13.codes, tile.rows, hidden_width),
        w13.scales,
        weights.contiguous(),
        tiles.pairs,
        tiles.spans,
        hidden,
        limit,
        hidden_width,
        width // CHANNELS,
        **options,
    )
    inputs = arrange(hidden, None, 1, w2.input_block if w2.quantizes_input else 0)
    outputs = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    _down[(triton.cdiv(width, tile.rows), capacity)](
        *_inputs(inputs, tile, halvings),
        describe_codes(w2.codes, tile.rows, tile.rows // 2),
        w2.scales,
        tiles.pairs,
        tiles.spans,
        outputs,
        width,
        hidden_width // CHANNELS,
        **options,
    )
    return outputs


def _tile(mean: int) -> _Tile:
    """For so many pairs of an expert if all are chosen alike: twice that, if it can."""
    wanted = min(bucket(2 * mean), _TILES[-1].tokens)
    return next(tile for tile in _TILES if tile.tokens >= wanted)


def _inputs(values: Tensor, tile: _Tile, halvings: int):
    return [describe_inputs(values, tile.tokens >> min(i, halvings)) for i in range(3)]


@gluon.jit
def _span(spans, tile):
    """``expert_tiles.span``."""
    word = gl.load(spans + tile)
    return (word >> 40).to(gl.int32), word.to(gl.int32), ((word >> 32) & 0xFF).to(gl.int32)


@gluon.jit
def _fits(expert, size, TOKENS: gl.constexpr, IS_LEAST: gl.constexpr):
    """Whether ``TOKENS`` is the smallest tile, of those allowed, that holds so many pairs."""
    return (expert >= 0) & (size <= TOKENS) & (IS_LEAST or size > TOKENS // 2)


@gluon.jit(do_not_specialize=["chunks"])
def _gate_up(
    inputs,
    inputs_2,
    inputs_4,
    codes,
    scales,
    weights,
    pairs,
    spans,
    hidden,
    limit,
    width,
    chunks,
    HALVINGS: gl.constexpr,
    TOKENS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Hidden columns of one tile of pairs: half of the rows are gate's, half are up's."""
    expert, first, size = _span(spans, gl.program_id(1))
    for halvings in gl.static_range(HALVINGS + 1):
        if _fits(expert, size, TOKENS >> halvings, halvings == HALVINGS):
            _gate_up_tile(
                inputs if halvings == 0 else inputs_2 if halvings == 1 else inputs_4,
                codes,
                scales,
                weights,
                pairs,
                expert,
                first,
                size,
                hidden,
                limit,
                width,
                chunks,
                TOKENS >> halvings,
                ROWS,
                STAGES,
            )


@gluon.jit
def _gate_up_tile(
    inputs,
    codes,
    scales,
    weights,
    pairs,
    expert,
    first,
    size,
    hidden,
    limit,
    width,
    chunks,
    TOKENS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    column = gl.program_id(0) * (ROWS // 2)
    scales += (2 * expert * width + column).to(gl.int64) * (4 * chunks)
    sums = multiply(
        codes,
        2 * expert,
        column,
        scales,
        inputs,
        first,
        chunks,
        width,
        ROWS,
        TOKENS,
        STAGES,
    )
    gate, up = gl.split(sums.to(gl.bfloat16).to(gl.float32))
    layout: gl.constexpr = gate.type.layout
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
    pair = gl.load(pairs + first + token, mask=token < size, other=0)
    # The weight counts before the rounding (v41-model 5.3).
    weight = gl.load(weights + pair, mask=token < size, other=0.0)
    value = (clamped_swiglu(gate, up, limit) * weight[None, :]).to(gl.bfloat16)
    store: gl.constexpr = _layout_of_stores(ROWS // 2, gl.num_warps())
    value = gl.convert_layout(value, store)
    column += gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, store))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, store))
    at = (first + token).to(gl.int64)[None, :] * width + column[:, None]
    gl.store(hidden + at, value, mask=(token < size)[None, :])


@gluon.jit(do_not_specialize=["chunks"])
def _down(
    inputs,
    inputs_2,
    inputs_4,
    codes,
    scales,
    pairs,
    spans,
    outputs,
    width,
    chunks,
    HALVINGS: gl.constexpr,
    TOKENS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Output columns of one tile of pairs, each pair's row at its own place."""
    expert, first, size = _span(spans, gl.program_id(1))
    for halvings in gl.static_range(HALVINGS + 1):
        if _fits(expert, size, TOKENS >> halvings, halvings == HALVINGS):
            _down_tile(
                inputs if halvings == 0 else inputs_2 if halvings == 1 else inputs_4,
                codes,
                scales,
                pairs,
                expert,
                first,
                size,
                outputs,
                width,
                chunks,
                TOKENS >> halvings,
                ROWS,
                STAGES,
            )


@gluon.jit
def _down_tile(
    inputs,
    codes,
    scales,
    pairs,
    expert,
    first,
    size,
    outputs,
    width,
    chunks,
    TOKENS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    half: gl.constexpr = ROWS // 2
    column = gl.program_id(0) * ROWS
    scales += (expert * width + column).to(gl.int64) * (4 * chunks)
    sums = multiply(
        codes,
        (expert * width + column) // half,
        0,
        scales,
        inputs,
        first,
        chunks,
        half,
        ROWS,
        TOKENS,
        STAGES,
    )
    store: gl.constexpr = _layout_of_stores(half, gl.num_warps())
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, store))
    pair = gl.load(pairs + first + token, mask=token < size, other=0).to(gl.int64)
    column += gl.arange(0, half, layout=gl.SliceLayout(1, store))
    at = outputs + pair[None, :] * width + column[:, None]
    live = (token < size)[None, :]
    low, high = gl.split(sums.to(gl.bfloat16))
    gl.store(at, gl.convert_layout(low, store), mask=live)
    gl.store(at + half, gl.convert_layout(high, store), mask=live)


@gluon.constexpr_function
def _layout_of_stores(rows, warps):
    """Of ``[rows, tokens]``: sixteen bytes of a token a thread."""
    return gl.BlockedLayout([8, 1], [rows // 8, 256 // rows], [1, warps], [0, 1])
