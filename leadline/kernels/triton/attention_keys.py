"""Keys of attention on Hopper: records loaded and expanded by warpgroups of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from leadline.kernels.triton import rings
from leadline.kernels.triton import unpack_hopper as unpack

BLOCK, HALF = unpack.KEYS, unpack.HALF
"""Keys of a block; channels of the halves in which blocks lie in shared memory."""

STAGES = gl.constexpr(4)
"""Blocks in shared memory."""


class Work(NamedTuple):
    """Rows of a program, a block of heads, and a range of key blocks of each row."""

    num_rows: Any
    num_heads: Any
    first: Any  # key block
    blocks: Any  # of keys, an even number
    window_blocks: Any  # of a row


class Keys(NamedTuple):
    """A ring of expanded blocks, in halves, and what to add to their scores."""

    blocks: Any
    masks: Any
    full: Any
    empty: Any


class Records(NamedTuple):
    """A cache of pages, and which of its rows each query row attends to."""

    words: Any
    scales: Any
    indices: Any
    row: Any  # stride of indices
    limit: Any  # where the split's indices end


@dataclass(frozen=True)
class Layout:
    """How a cache lies in memory; strides count words and scales."""

    record: gl.constexpr
    per_page: int
    page: int
    place: int
    scales_of_page: int
    scales_of_place: int


@gluon.constexpr_function
def layout(record, *numbers):
    """A ``Layout`` as a constant of kernels."""
    return Layout(gl.constexpr(record), *numbers)


class Pages(NamedTuple):
    """Page tables of requests, and the request of each row."""

    table: Any
    row: Any
    req_of_row: Any


@gluon.jit
def new_ring(READERS: gl.constexpr):
    """Memory for blocks that so many warpgroups read."""
    pairs: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Keys(
        gl.allocate_shared_memory(gl.int32, [2 * STAGES, BLOCK, HALF // 2], pairs),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], vector),
        rings.barriers(STAGES, 1),
        rings.barriers(STAGES, READERS),
    )


@gluon.jit
def load(
    PARITY: gl.constexpr,
    keys,
    work,
    window,
    entries,
    pages,
    WINDOW: gl.constexpr,
    ENTRIES: gl.constexpr,
):
    """Every other block of keys, expanded, into shared memory."""
    begin = work.first
    end = begin + work.blocks
    window_end = end
    if ENTRIES.record != "none":
        window_end = gl.minimum(end, work.window_blocks)
    turn = 0
    for row_number in range(gl.program_id(0), work.num_rows, gl.num_programs(0)):
        row = gl.cast(row_number, gl.int64)
        turn = _stream(window, pages.table, row, begin, window_end, keys, turn, WINDOW, PARITY)
        if ENTRIES.record != "none":
            table = pages.table + gl.load(pages.req_of_row + row).to(gl.int64) * pages.row
            first = gl.maximum(begin - work.window_blocks, 0)
            last = end - work.window_blocks
            turn = _stream(entries, table, row, first, last, keys, turn, ENTRIES, PARITY)


@gluon.jit
def _stream(
    records, table, row, begin, end, keys, turn, LAYOUT: gl.constexpr, PARITY: gl.constexpr
):
    """Those of a row's blocks that fall on turns of this parity into the ring.

    Loads of the next are on their way while one is expanded.
    """
    first = begin + ((turn + PARITY) & 1)
    index = _indices(records, row, first, LAYOUT.record)
    rows = _load_rows(records, index, _pages_of(table, index, LAYOUT), LAYOUT)
    index = _indices(records, row, first + 2, LAYOUT.record)
    for block in range(first, end, 2):
        page = _pages_of(table, index, LAYOUT)
        _expand(rows, keys, turn + block - begin, LAYOUT.record)
        rows = _load_rows(records, index, page, LAYOUT)
        index = _indices(records, row, block + 4, LAYOUT.record)
    return turn + gl.maximum(end - begin, 0)


@gluon.jit
def _indices(records, row, block, RECORD: gl.constexpr):
    """A block's indices, -1 behind the limit."""
    slot = block * BLOCK + gl.arange(0, BLOCK, layout=unpack.of_keys(RECORD))
    at = records.indices + row * records.row + slot
    return gl.load(at, mask=slot < records.limit, other=-1).to(gl.int32)


@gluon.jit
def _pages_of(table, index, LAYOUT: gl.constexpr):
    page = index
    if LAYOUT.per_page > 1:
        at = table + gl.maximum(index, 0) // LAYOUT.per_page
        page = gl.load(at, mask=index >= 0, other=0)
    return page.to(gl.int64)


@gluon.jit
def _load_rows(records, index, page, LAYOUT: gl.constexpr):
    place = gl.maximum(index, 0) % LAYOUT.per_page
    values = records.words + (page * LAYOUT.page + place * LAYOUT.place)
    scales = records.scales + (page * LAYOUT.scales_of_page + place * LAYOUT.scales_of_place)
    return unpack.load_rows(values, scales, index >= 0, LAYOUT.record)


@gluon.jit
def _expand(rows, keys, turn, RECORD: gl.constexpr):
    """A block into its stage of the ring, once that is free."""
    rings.wait_empty(keys.empty, turn)
    stage = turn % STAGES
    keys.blocks.index(2 * stage).store(unpack.expand(rows.left, rows.left_codes, RECORD))
    keys.blocks.index(2 * stage + 1).store(unpack.expand(rows.right, rows.right_codes, RECORD))
    keys.masks.index(stage).store(gl.where(rows.valid, 0.0, -float("inf")))
    fence_async_shared()
    rings.arrive(keys.full, turn)
