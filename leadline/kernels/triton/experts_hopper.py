"""Routed experts on Hopper, from some pairs an expert on (kernels.md 10.3).

Four launches up to the pairs' rows: ``expert_tiles``; rows copied to where their pairs lie, sorted
by expert, since bulk copies take neighbours; gate and up with SwiGLU, the routing weight and the
FP8 rounding behind them; down. Products are those of ``mxfp4_hopper``.
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
from leadline.kernels.triton.formats import absmax, fp8_scale, round_trip_e4m3
from leadline.kernels.triton.launch import bucket
from leadline.kernels.triton.mxfp4_hopper import (
    CHANNELS,
    ROWS,
    Source,
    arrange,
    copy,
    describe_codes,
    describe_inputs,
    empty_inputs,
    multiply,
    place_of,
    ring_of,
)
from leadline.kernels.triton.swiglu import clamped_swiglu

_HALF = gl.constexpr(ROWS.value // 2)
# Of ``[64, pairs]``: sixteen bytes of a pair's row a thread.
_STORES = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))


@dataclass(frozen=True, slots=True)
class _Tile:
    """What one program multiplies.

    Attributes:
        pairs: at most.
        groups: warpgroups, of 128 rows of the weight each.
        registers: of a thread on average, so that more than one program fits.
    """

    pairs: int
    groups: int
    registers: int | None = None


# A warpgroup expands while another multiplies, be it of another program. Two of one program read
# half as many inputs, which counts where there are many.
_TILES = (
    _Tile(32, groups=1, registers=80),
    _Tile(64, groups=1, registers=96),
    _Tile(128, groups=2),
)
_STAGES = 4


def fits(w2: PackedWeight) -> bool:
    """Whether whole tiles divide such a stack and the one before it."""
    _, width, hidden_width = w2.shape
    return width % (2 * ROWS.value) == 0 and hidden_width % CHANNELS == 0


def pair_outputs(
    x: Tensor, ids: Tensor, weights: Tensor, w13: PackedWeight, w2: PackedWeight, *, limit: float
) -> Tensor:
    """Each expert's output for each of its rows, as ``ops.routed_experts``.

    Args:
        x: ``[m, D]`` bf16, m at least 1.
        ids: ``[m, k]`` int64 in -1 .. E - 1.
        weights: ``[m, k]`` float32.
        w13: MXFP4 ``[E, 2 F, D]``, gate rows first; it ``fits``.
        w2: MXFP4 ``[E, D, F]``.
        limit: of the clamp.

    Returns:
        ``[m k, D]`` bf16; rows of pairs with id -1 are not written.
    """
    num_experts, width, hidden_width = w2.shape
    ids = ids.contiguous()
    tile = _tile(planned_rows(len(ids)) * ids.shape[1] // num_experts)
    tiles = sort_pairs(ids, num_experts=num_experts, tile_size=tile.pairs)
    inputs = arrange(x, tiles, ids, w13.input_block if w13.quantizes_input else 0)
    hidden = empty_inputs(ids.numel(), hidden_width, x.device)
    _multiply(
        *(inputs, w13, tiles, tile, hidden),
        width=hidden_width,
        weights=weights.contiguous(),
        limit=limit,
        rounds=w2.quantizes_input,
    )
    del inputs  # half a GB at 8,192 rows, which outputs may take
    outputs = torch.empty(ids.numel(), width, dtype=x.dtype, device=x.device)
    _multiply(hidden, w2, tiles, tile, outputs, width=width)
    return outputs


def _tile(mean: int) -> _Tile:
    """For so many pairs of an expert if all are chosen alike: twice that, if it can."""
    wanted = min(bucket(2 * mean), _TILES[-1].pairs)
    return next(tile for tile in _TILES if tile.pairs >= wanted)


def _multiply(
    inputs: Tensor,
    weight: PackedWeight,
    tiles: Tiles,
    tile: _Tile,
    out: Tensor,
    *,
    width: int,
    weights: Tensor | None = None,
    limit: float = 0.0,
    rounds: bool = False,
) -> None:
    """Gate and up into hidden rows, or, without routing weights, down into the pairs' own rows."""
    _, rows, channels = weight.shape
    # Tiles that are not full shrink, unless others' pairs must not change how one is multiplied.
    halvings = 0 if batch_invariance.switch.enabled else min(tile.pairs // 16 - 1, 2)
    _multiply_tile[(rows // (tile.groups * ROWS.value), len(tiles.spans))](
        *(describe_inputs(inputs, tile.pairs >> min(i, halvings)) for i in range(3)),
        describe_codes(weight.codes, _HALF.value if weights is None else width),
        weight.scales,
        tiles.pairs,
        tiles.spans,
        out,
        width,
        weights,
        limit,
        len(tiles.pairs),
        channels // CHANNELS,
        ROUNDS=rounds,
        HALVINGS=halvings,
        PAIRS=tile.pairs,
        GROUPS=tile.groups,
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
    weights: Any
    limit: Any
    num_pairs: Any


@gluon.jit(do_not_specialize=["num_pairs", "chunks"])
def _multiply_tile(
    inputs,
    inputs_2,
    inputs_4,
    codes,
    scales,
    pairs,
    spans,
    out,
    width,
    weights,
    limit,
    num_pairs,
    chunks,
    ROUNDS: gl.constexpr,
    HALVINGS: gl.constexpr,
    PAIRS: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Some rows of an expert's matrix by one tile of its pairs.

    Args:
        inputs: descriptor of whole tiles of ``arrange``'s.
        inputs_2: of halves of them.
        inputs_4: of quarters.
        codes: descriptor of the weight's.
        scales: its bytes.
        pairs: of ``Tiles``.
        spans: likewise.
        out: hidden rows in the form of ``arrange``, or outputs ``[pairs, width]``.
        width: of ``out``.
        weights: of pairs; None for down.
        limit: of the clamp.
        num_pairs: of all.
        chunks: stages of a sum.
        ROUNDS: hidden rows to FP8.
        HALVINGS: of a tile that is not full, at most.
        PAIRS: of a whole one.
        GROUPS: warpgroups that multiply.
        STAGES: in shared memory.
    """
    expert, place, size = span(spans, gl.program_id(1))
    expert = expert.to(gl.int32)
    if expert >= 0:
        if weights is None:
            column = gl.program_id(0) * (GROUPS * ROWS)
            row = expert * width + column
            rows = (row // _HALF, 0, row // _HALF + 2, 0)
        else:
            column = gl.program_id(0) * (GROUPS * _HALF)
            row = 2 * expert * width + column
            rows = (2 * expert, column, 2 * expert, column + _HALF)
        scale = scales + row.to(gl.int64) * (4 * chunks)
        source = Source(codes, rows, (inputs, inputs_2, inputs_4), place, size, chunks)
        to = _To(out, width, column, pairs, weights, limit, num_pairs)
        ring = ring_of(STAGES, PAIRS, GROUPS)
        if GROUPS == 2:
            gl.warp_specialize(
                [
                    (_multiply_rows, (0, ring, source, scale, to, ROUNDS, HALVINGS, PAIRS)),
                    (_multiply_rows, (1, ring, source, scale, to, ROUNDS, HALVINGS, PAIRS)),
                    (copy, (ring, source, HALVINGS, PAIRS, GROUPS)),
                ],
                [4, 1],
                [240, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (_multiply_rows, (0, ring, source, scale, to, ROUNDS, HALVINGS, PAIRS)),
                    (copy, (ring, source, HALVINGS, PAIRS, GROUPS)),
                ],
                [1],
                [24],
            )


@gluon.jit
def _multiply_rows(
    GROUP: gl.constexpr,
    ring,
    source,
    scale,
    to,
    ROUNDS: gl.constexpr,
    HALVINGS: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """Those of one warpgroup, for the smallest tile that holds the pairs."""
    codes = ring.codes if GROUP == 0 else ring.other_codes
    for halvings in gl.static_range(HALVINGS + 1):
        if is_size(source.size, PAIRS >> halvings, halvings == HALVINGS):
            _multiply_tile_rows(GROUP, ring, codes, source, scale, to, ROUNDS, PAIRS >> halvings)


@gluon.jit
def _multiply_tile_rows(
    GROUP: gl.constexpr,
    ring,
    codes,
    source,
    scale,
    to,
    ROUNDS: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """The same for a tile of a size."""
    if to.weights is None:
        row = GROUP * ROWS
        scale += row * (4 * source.chunks)
        sums = multiply(ring, codes, scale, _HALF, source.chunks, PAIRS)
        _store_outputs(sums, to, to.column + row, source)
    else:
        row = GROUP * _HALF
        scale += row * (4 * source.chunks)
        sums = multiply(ring, codes, scale, to.width, source.chunks, PAIRS)
        _store_hidden(sums, to, to.column + row, source, ROUNDS)


@gluon.jit
def _store_hidden(sums, to, column, source, ROUNDS: gl.constexpr):
    """SwiGLU of gate and up times the routing weight, to where down takes it."""
    pairs: gl.constexpr = sums.shape[1]
    gate, up = gl.split(sums.to(gl.bfloat16).to(gl.float32))
    token = gl.arange(0, pairs, layout=gl.SliceLayout(0, gate.type.layout))
    live = token < source.size
    pair = gl.load(to.pairs + source.place + token, mask=live, other=0)
    # The weight counts before the rounding (v41-model 5.3).
    weight = gl.load(to.weights + pair, mask=live, other=0.0)
    value = (clamped_swiglu(gate, up, to.limit) * weight[None, :]).to(gl.bfloat16)
    value = gl.convert_layout(value, _STORES)
    if ROUNDS:
        blocks = gl.reshape(value.to(gl.float32), [_HALF // 32, 32, pairs])
        exponents = gl.expand_dims(fp8_scale(absmax(blocks, 1)), 1)
        blocks = round_trip_e4m3(blocks, exponents).to(gl.bfloat16)
        value = gl.convert_layout(gl.reshape(blocks, [_HALF, pairs]), _STORES)
    block, channel = place_of(column + gl.arange(0, _HALF, layout=gl.SliceLayout(1, _STORES)))
    token = gl.arange(0, pairs, layout=gl.SliceLayout(0, _STORES))
    at = (block.to(gl.int64) * to.num_pairs)[:, None] + (source.place + token)[None, :]
    gl.store(to.out + at * 64 + channel[:, None], value, mask=(token < source.size)[None, :])


@gluon.jit
def _store_outputs(sums, to, column, source):
    """Each pair's columns to its own row."""
    token = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, _STORES))
    live = token < source.size
    pair = gl.load(to.pairs + source.place + token, mask=live, other=0).to(gl.int64)
    column += gl.arange(0, _HALF, layout=gl.SliceLayout(1, _STORES))
    at = to.out + pair[None, :] * to.width + column[:, None]
    low, high = gl.split(sums.to(gl.bfloat16))
    gl.store(at, gl.convert_layout(low, _STORES), mask=live[None, :])
    gl.store(at + _HALF, gl.convert_layout(high, _STORES), mask=live[None, :])
