"""What comes before the experts' products: pairs sorted by expert, tiles of them, inputs as planes.

All of it in one launch, with no sum that crosses programs: every program that belongs to an expert
counts all ids itself, which is cheaper than waiting for another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.triton.formats import absmax, cast, fp8_scale, round_trip_e4m3
from leadline.kernels.triton.launch import bucket
from leadline.kernels.triton.mxfp4 import plane_offset

_BLOCK_CHANNELS = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """Work of a grouped product, as far as only the device knows it.

    A pair is a row's choice of one expert: number ``row * k + slot`` of ids ``[m, k]``.

    Attributes:
        pairs: ``[m k]`` int32, pairs by expert, in their order within an expert; -1 behind them.
        spans: ``[capacity]`` int64, one a tile, -1 behind the last; see ``span``.
        places: ``[m k]`` int32, where among ``pairs`` each pair is; undefined for id -1.
    """

    pairs: Tensor
    spans: Tensor
    places: Tensor


def prepare(
    x: Tensor, ids: Tensor, *, num_experts: int, tile_size: int, input_block: int
) -> tuple[Tiles, Tensor]:
    """Tiles of each expert's pairs, and inputs as ``mxfp4`` wants them, rounded to FP8 if wanted.

    Args:
        x: ``[m, D]`` bf16, m at least 1.
        ids: ``[m, k]`` int64 in -1 .. num_experts - 1; -1 belongs to no tile.
        num_experts: E.
        tile_size: pairs of a tile.
        input_block: channels that share a scale where inputs are rounded; 0 leaves them.

    Returns:
        Tiles, and ``[m, D]`` bf16, laid out by ``mxfp4.plane_offset`` for tiles of that size.
    """
    num_rows, width = x.shape
    num_pairs = ids.numel()
    tiles = _empty_tiles(ids, num_experts, tile_size)
    planes = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(width, _BLOCK_CHANNELS)
    _prepare[(num_experts + num_rows * blocks,)](
        ids.contiguous(),
        tiles.pairs,
        tiles.spans,
        tiles.places,
        num_pairs,
        len(tiles.spans),
        x,
        x.stride(0),
        planes,
        WIDTH=width,
        NUM_EXPERTS=num_experts,
        TILE=tile_size,
        INPUT_BLOCK=input_block,
        BLOCK_PAIRS=min(max(bucket(num_pairs), 128), 1024),
        BLOCK_CHANNELS=_BLOCK_CHANNELS,
    )
    return tiles, planes


def sort_pairs(ids: Tensor, *, num_experts: int, tile_size: int) -> Tiles:
    """Tiles alone, of arguments as of ``prepare``."""
    tiles = _empty_tiles(ids, num_experts, tile_size)
    _sort_pairs[(num_experts,)](
        ids.contiguous(),
        tiles.pairs,
        tiles.spans,
        tiles.places,
        ids.numel(),
        len(tiles.spans),
        NUM_EXPERTS=num_experts,
        TILE=tile_size,
        BLOCK=min(max(bucket(ids.numel()), 128), 4096),
        num_warps=8,
    )
    return tiles


def _empty_tiles(ids: Tensor, num_experts: int, tile_size: int) -> Tiles:
    num_pairs = ids.numel()
    capacity = min(num_pairs, num_experts + num_pairs // tile_size)
    return Tiles(
        pairs=torch.empty(num_pairs, dtype=torch.int32, device=ids.device),
        spans=torch.empty(capacity, dtype=torch.int64, device=ids.device),
        places=torch.empty(num_pairs, dtype=torch.int32, device=ids.device),
    )


@triton.jit
def span(spans, tile):
    """A tile's expert (int64), first place among ``Tiles.pairs`` and number of pairs.

    One word, so that a program waits for memory once before it can ask for weights. The expert is
    negative where there is no such tile.
    """
    word = tl.load(spans + tile)
    return word >> 40, word.to(tl.int32), ((word >> 32) & 0xFF).to(tl.int32)


@triton.jit
def is_size(size, TILE: tl.constexpr, IS_LEAST: tl.constexpr):
    """Whether ``TILE`` is the smallest tile, of those allowed, that holds so many pairs."""
    return (size <= TILE) & (IS_LEAST or size > TILE // 2)


@triton.jit
def _prepare(
    ids,
    pairs,
    spans,
    places,
    num_pairs,
    capacity,
    x,
    stride,
    planes,
    WIDTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """A program per expert, then one per row and block of channels."""
    program = tl.program_id(0)
    if program < NUM_EXPERTS:
        _sort(
            *(ids, pairs, spans, places, num_pairs, capacity),
            *(program, NUM_EXPERTS, TILE, BLOCK_PAIRS),
        )
    else:
        blocks = tl.cdiv(WIDTH, BLOCK_CHANNELS)
        row = ((program - NUM_EXPERTS) // blocks).to(tl.int64)
        block = (program - NUM_EXPERTS) % blocks
        to = planes + row * WIDTH
        _deal(x + row * stride, to, block, WIDTH, TILE, INPUT_BLOCK, BLOCK_CHANNELS)


@triton.jit
def _sort_pairs(
    ids,
    pairs,
    spans,
    places,
    num_pairs,
    capacity,
    NUM_EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program per expert."""
    expert = tl.program_id(0)
    _sort(ids, pairs, spans, places, num_pairs, capacity, expert, NUM_EXPERTS, TILE, BLOCK)


@triton.jit
def _sort(
    ids,
    pairs,
    spans,
    places,
    num_pairs,
    capacity,
    expert,
    NUM_EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Places the pairs of one expert, and its tiles."""
    BINS: tl.constexpr = max(triton.next_power_of_2(NUM_EXPERTS), 32)
    bins = tl.arange(0, BINS)
    sizes = tl.zeros((BINS,), tl.int32)
    start = 0
    while start < num_pairs:
        chosen = _load_ids(ids, start, num_pairs, BLOCK)
        sizes += tl.histogram(chosen, BINS, mask=chosen >= 0)
        start += BLOCK
    first = tl.sum(tl.where(bins < expert, sizes, 0))
    end = first + tl.sum(tl.where(bins == expert, sizes, 0))
    num_tiles = tl.cdiv(sizes, TILE)
    tile = tl.sum(tl.where(bins < expert, num_tiles, 0))
    place = first
    while place < end:
        size = tl.minimum(end - place, TILE).to(tl.int64)
        tl.store(spans + tile, expert.to(tl.int64) << 40 | size << 32 | place)
        tile += 1
        place += TILE
    if expert == NUM_EXPERTS - 1:
        while tile < capacity:
            rest = tile + tl.arange(0, BINS)
            tl.store(spans + rest, -1, mask=rest < capacity)
            tile += BINS
        unused = end
        while unused < num_pairs:
            rest = unused + tl.arange(0, BLOCK)
            tl.store(pairs + rest, -1, mask=rest < num_pairs)
            unused += BLOCK
    start, place = 0, first
    while place < end:  # this expert's pairs may all have been seen before the last block
        mine = (_load_ids(ids, start, num_pairs, BLOCK) == expert).to(tl.int32)
        pair, at = start + tl.arange(0, BLOCK), place + tl.cumsum(mine) - 1
        tl.store(pairs + at, pair, mask=mine != 0)
        tl.store(places + pair, at, mask=mine != 0)
        place += tl.sum(mine)
        start += BLOCK


@triton.jit
def _load_ids(ids, start, num_pairs, BLOCK: tl.constexpr):
    pair = start + tl.arange(0, BLOCK)
    return tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)


@triton.jit
def _deal(
    x,
    planes,
    block,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of a row's channels, dealt out to the planes."""
    SCALED: tl.constexpr = INPUT_BLOCK if INPUT_BLOCK else 32
    group = tl.arange(0, BLOCK // SCALED)
    channel = block * BLOCK + group[:, None] * SCALED + tl.arange(0, SCALED)[None, :]
    value = tl.load(x + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    if INPUT_BLOCK:
        value = round_trip_e4m3(value, fp8_scale(absmax(value, 1))[:, None])
    at = plane_offset(channel, WIDTH, TILE <= 16)
    tl.store(planes + at, cast(value, planes.dtype.element_ty), mask=channel < WIDTH)
