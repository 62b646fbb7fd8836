"""Routed experts on Hopper whose inputs are FP8, up to some 64 pairs an expert (kernels.md 10.3).

Five launches up to the pairs' rows: ``expert_tiles``; rows quantised and copied to where their
pairs lie, sorted by expert, since bulk copies take neighbours; gate and up with SwiGLU and the
routing weight; hidden rows quantised; down. Products are those of ``mxfp4_fp8_hopper``. Programs
are numbered as in ``experts``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from leadline.kernels import batch_invariance
from leadline.kernels.batch_invariance import planned_rows
from leadline.kernels.packed import PackedWeight
from leadline.kernels.triton.expert_tiles import Tiles, is_size, sort_pairs, span
from leadline.kernels.triton.fp8_inputs import Inputs, arrange
from leadline.kernels.triton.launch import bucket
from leadline.kernels.triton.mxfp4_fp8_hopper import (
    CHANNELS,
    ROWS,
    Source,
    copy,
    describe_codes,
    describe_inputs,
    multiply,
    ring_of,
)
from leadline.kernels.triton.swiglu import clamped_swiglu

_HALF = gl.constexpr(ROWS.value // 2)


@dataclass(frozen=True, slots=True)
class _Tile:
    """What one program multiplies.

    Attributes:
        pairs: at most.
        registers: of a thread, on average over all warps: what fits.
    """

    pairs: int
    registers: int


# Four programs on a multiprocessor, of the largest tile two: each waits for weights on its own.
_TILES = (_Tile(8, 64), _Tile(16, 64), _Tile(32, 64), _Tile(64, 96))
_STAGES = 3


def fits(w13: PackedWeight, w2: PackedWeight) -> bool:
    """Whether inputs are FP8 as these kernels take them, and whole stages divide the stacks."""
    _, width, hidden_width = w2.shape
    rounds = w13.quantizes_input and w2.quantizes_input
    return rounds and width % CHANNELS == 0 and hidden_width % CHANNELS == 0


def pair_outputs(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    *,
    limit: float,
) -> Tensor:
    """Each expert's output for each of its rows, as ``ops.routed_experts``.

    Args:
        x: ``[m, D]`` bf16, m at least 1.
        ids: ``[m, k]`` int64 in -1 .. E - 1.
        weights: ``[m, k]`` float32.
        w13: MXFP4 ``[E, 2 F, D]``, gate rows first; both stacks ``fit``.
        w2: MXFP4 ``[E, D, F]``.
        limit: of the clamp.

    Returns:
        ``[m k, D]`` bf16; rows of pairs with id -1 are not written.
    """
    num_experts, width, hidden_width = w2.shape
    ids = ids.contiguous()
    tile = _tile(planned_rows(len(ids)) * ids.shape[1] // num_experts)
    tiles = sort_pairs(ids, num_experts=num_experts, tile_size=tile.pairs)
    hidden = torch.empty(ids.numel(), hidden_width, dtype=x.dtype, device=x.device)
    _multiply(
        *(arrange(x, w13.input_block, tiles, ids), w13, tiles, tile, hidden),
        weights=weights.contiguous(),
        limit=limit,
    )
    outputs = torch.empty(ids.numel(), width, dtype=x.dtype, device=x.device)
    _multiply(arrange(hidden, w2.input_block), w2, tiles, tile, outputs)
    return outputs


def _tile(mean: int) -> _Tile:
    """For so many pairs of an expert if all are chosen alike: twice that, if it can."""
    wanted = min(bucket(2 * mean), _TILES[-1].pairs)
    return next(tile for tile in _TILES if tile.pairs >= wanted)


def _multiply(
    inputs: Inputs,
    weight: PackedWeight,
    tiles: Tiles,
    tile: _Tile,
    out: Tensor,
    *,
    weights: Tensor | None = None,
    limit: float = 0.0,
) -> None:
    """Gate and up into hidden rows, or, without routing weights, down into the pairs' own rows."""
    _, rows, channels = weight.shape
    width = out.shape[1]
    # Tiles that are not full shrink, unless others' pairs must not change how one is multiplied.
    halvings = 0 if batch_invariance.switch.enabled else min(tile.pairs // 8 - 1, 2)
    _multiply_tile[(rows // ROWS.value, len(tiles.spans))](
        *(describe_inputs(inputs, tile.pairs >> min(i, halvings)) for i in range(3)),
        describe_codes(weight.codes, _HALF.value if weights is None else width),
        inputs.powers,
        weight.scales.view(torch.int32),
        tiles.pairs,
        tiles.spans,
        out,
        width,
        weights,
        limit,
        channels // CHANNELS,
        HALVINGS=halvings,
        TILE=tile.pairs,
        STAGES=_STAGES,
        num_warps=4,
        maxnreg=tile.registers,
    )


class _To(NamedTuple):
    """Where values go, as ``_multiply_tile`` has it, and the program's first column."""

    out: Any
    width: Any
    column: Any
    pairs: Any
    powers: Any
    weights: Any
    limit: Any


@gluon.jit(do_not_specialize=["chunks"])
def _multiply_tile(
    inputs,
    inputs_2,
    inputs_4,
    codes,
    powers,
    scales,
    pairs,
    spans,
    out,
    width,
    weights,
    limit,
    chunks,
    HALVINGS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Some rows of an expert's matrix by one tile of its pairs.

    Args:
        inputs: descriptor of whole tiles' inputs.
        inputs_2: of halves of them.
        inputs_4: of quarters.
        codes: descriptor of the weight's.
        powers: of the inputs.
        scales: of the weight, four a word.
        pairs: of ``Tiles``.
        spans: likewise.
        out: hidden rows of sorted pairs, or outputs of pairs, ``[pairs, width]`` bf16.
        width: of ``out``.
        weights: of pairs; None for down.
        limit: of the clamp.
        chunks: stages of a sum.
        HALVINGS: of a tile that is not full, at most.
        TILE: pairs of a whole one.
        STAGES: in shared memory.
    """
    expert, place, size = span(spans, gl.program_id(1))
    expert = expert.to(gl.int32)
    if expert >= 0:
        if weights is None:
            column = gl.program_id(0) * ROWS
            row = expert * width + column
            matrix, matrix_row, apart = row // _HALF, 0, _HALF
        else:
            column = gl.program_id(0) * _HALF
            row = 2 * expert * width + column
            matrix, matrix_row, apart = 2 * expert, column, width
        scales += row.to(gl.int64) * (2 * chunks)
        to = _To(out, width, column, pairs + place, powers + place, weights, limit)
        ring = ring_of(STAGES, TILE)
        source = Source(
            *(codes, matrix, matrix_row, scales, apart),
            *((inputs, inputs_2, inputs_4), place, size, chunks),
        )
        gl.warp_specialize(
            [
                (_multiply_rows, (ring, source, to, HALVINGS, TILE)),
                (_copy_rows, (ring, source, HALVINGS, TILE)),
            ],
            [1],
            [24],
        )


@gluon.jit
def _copy_rows(ring, source, HALVINGS: gl.constexpr, TILE: gl.constexpr):
    """For the smallest tile that holds the pairs."""
    for halvings in gl.static_range(HALVINGS + 1):
        if is_size(source.size, TILE >> halvings, halvings == HALVINGS):
            copy(ring, source, halvings, TILE >> halvings)


@gluon.jit
def _multiply_rows(ring, source, to, HALVINGS: gl.constexpr, TILE: gl.constexpr):
    """Likewise."""
    for halvings in gl.static_range(HALVINGS + 1):
        if is_size(source.size, TILE >> halvings, halvings == HALVINGS):
            sums = multiply(ring, source, to.powers, TILE >> halvings)
            if to.weights is None:
                _store_outputs(sums, source, to)
            else:
                _store_hidden(sums, source, to)


@gluon.jit
def _store_hidden(sums, source, to):
    """SwiGLU of gate and up times the routing weight."""
    gate, up = gl.split(sums.to(gl.float32))
    token = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, gate.type.layout))
    live = token < source.size
    pair = gl.load(to.pairs + token, mask=live, other=0)
    # The weight counts before the rounding (v41-model 5.3).
    weight = gl.load(to.weights + pair, mask=live, other=0.0)
    value = (clamped_swiglu(gate, up, to.limit) * weight[None, :]).to(gl.bfloat16)
    stores: gl.constexpr = _layout_of_stores(sums.shape[1])
    value = gl.convert_layout(value, stores)
    token = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, stores))
    column = to.column + gl.arange(0, _HALF, layout=gl.SliceLayout(1, stores))
    at = (source.place + token).to(gl.int64)[None, :] * to.width + column[:, None]
    gl.store(to.out + at, value, mask=(token < source.size)[None, :])


@gluon.jit
def _store_outputs(sums, source, to):
    """Each pair's columns to its own row."""
    stores: gl.constexpr = _layout_of_stores(sums.shape[1])
    token = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, stores))
    live = token < source.size
    pair = gl.load(to.pairs + token, mask=live, other=0).to(gl.int64)
    column = to.column + gl.arange(0, _HALF, layout=gl.SliceLayout(1, stores))
    at = to.out + pair[None, :] * to.width + column[:, None]
    low, high = gl.split(sums)
    gl.store(at, gl.convert_layout(low, stores), mask=live[None, :])
    gl.store(at + _HALF, gl.convert_layout(high, stores), mask=live[None, :])


@gluon.constexpr_function
def _layout_of_stores(pairs):
    """Of ``[32, pairs]``: neighbours of a pair's row in a thread."""
    held = min(pairs // 4, 8)
    return gl.BlockedLayout([held, 1], [32 // held, held], [1, 4], [0, 1])
