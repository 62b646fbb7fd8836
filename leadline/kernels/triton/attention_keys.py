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
    """Rows of a program, a block of heads, and what says which key blocks of a row are its own."""

    num_rows: Any
    num_heads: Any
    parts_per_split: Any
    num_window: Any  # places of a row
    num_entries: Any  # likewise, where ``visible`` is None
    visible: Any  # how many entries each row attends to, all of them
    req_of_row: Any


class Span(NamedTuple):
    """A row's key blocks of one split, an even number; of the window first."""

    first: Any
    blocks: Any
    num_entries: Any
    window_blocks: Any


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
    indices: Any  # None for places one after the other
    row: Any  # stride of indices


@dataclass(frozen=True)
class Layout:
    """How a cache lies in memory; strides count words and scales."""

    record: gl.constexpr
    tabled: bool  # a row of the page table tells where a page is
    per_page: int
    page: int
    place: int
    scales_of_page: int
    scales_of_place: int


@gluon.constexpr_function
def entry_layout(record, *numbers):
    """A ``Layout`` of pages, as a constant of kernels."""
    return Layout(gl.constexpr(record), True, *numbers)


@gluon.constexpr_function
def window_layout(record, ring, ring_stride, row_stride, ring_scales, row_scales):
    """A ``Layout`` of rings; where their rows follow one another, each is a page."""
    if ring_stride == ring * row_stride:
        ring, ring_stride, row_stride, ring_scales, row_scales = 1, row_stride, 0, row_scales, 0
    numbers = ring, ring_stride, row_stride, ring_scales, row_scales
    return Layout(gl.constexpr(record), False, *numbers)


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
def span_of(work, row):
    """The blocks of a row that this program attends to."""
    num_entries, parts_per_split = work.num_entries, work.parts_per_split
    window_blocks = (work.num_window + BLOCK - 1) // BLOCK
    if work.visible is not None:
        is_real = gl.load(work.req_of_row + row) >= 0
        num_entries = gl.load(work.visible + row, mask=is_real, other=0).to(gl.int32)
    num_blocks = window_blocks + (num_entries + BLOCK - 1) // BLOCK
    if work.visible is not None:  # its entries are as few or many as the row says
        splits = gl.num_programs(1)
        parts_per_split = ((num_blocks + splits - 1) // splits + 1) // 2 * 2
    first = gl.program_id(1) * parts_per_split
    blocks = (gl.minimum(parts_per_split, num_blocks - first) + 1) // 2 * 2
    return Span(first, gl.maximum(blocks, 2), num_entries, window_blocks)


@gluon.jit
def load(
    PARITY: gl.constexpr,
    keys,
    work,
    window,
    entries,
    page_table,
    table_row,
    WINDOW: gl.constexpr,
    ENTRIES: gl.constexpr,
):
    """Every other block of keys, expanded, into shared memory."""
    turn = 0
    for row_number in range(gl.program_id(0), work.num_rows, gl.num_programs(0)):
        row = gl.cast(row_number, gl.int64)
        span = span_of(work, row)
        end = span.first + span.blocks
        window_end = end
        if ENTRIES.record != "none":
            window_end = gl.minimum(end, span.window_blocks)
        limit = gl.minimum(end * BLOCK, work.num_window)
        turn = _stream(
            window, page_table, row, span.first, window_end, limit, keys, turn, WINDOW, PARITY
        )
        if ENTRIES.record != "none":
            table = page_table + gl.load(work.req_of_row + row).to(gl.int64) * table_row
            first = gl.maximum(span.first - span.window_blocks, 0)
            last = end - span.window_blocks
            limit = gl.minimum(last * BLOCK, span.num_entries)
            turn = _stream(entries, table, row, first, last, limit, keys, turn, ENTRIES, PARITY)


@gluon.jit
def _stream(
    records, table, row, begin, end, limit, keys, turn, LAYOUT: gl.constexpr, PARITY: gl.constexpr
):
    """Those of a row's blocks that fall on turns of this parity into the ring.

    Loads of the next are on their way while one is expanded.
    """
    first = begin + ((turn + PARITY) & 1)
    index = _indices(records, row, first, limit, LAYOUT.record)
    rows = _load_rows(records, index, _pages_of(table, index, LAYOUT), LAYOUT)
    index = _indices(records, row, first + 2, limit, LAYOUT.record)
    for block in range(first, end, 2):
        page = _pages_of(table, index, LAYOUT)
        _expand(rows, keys, turn + block - begin, LAYOUT.record)
        rows = _load_rows(records, index, page, LAYOUT)
        index = _indices(records, row, block + 4, limit, LAYOUT.record)
    return turn + gl.maximum(end - begin, 0)


@gluon.jit
def _indices(records, row, block, limit, RECORD: gl.constexpr):
    """A block's indices, -1 from the limit on."""
    slot = block * BLOCK + gl.arange(0, BLOCK, layout=unpack.of_keys(RECORD))
    if records.indices is None:
        index = gl.where(slot < limit, slot, -1)
    else:
        at = records.indices + row * records.row + slot
        index = gl.load(at, mask=slot < limit, other=-1).to(gl.int32)
    return index


@gluon.jit
def _pages_of(table, index, LAYOUT: gl.constexpr):
    page = gl.maximum(index, 0) // LAYOUT.per_page
    if LAYOUT.tabled:
        page = gl.load(table + page, mask=index >= 0, other=0)
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
    keys.blocks.index(2 * stage).store(unpack.expand(rows, 0, RECORD))
    keys.blocks.index(2 * stage + 1).store(unpack.expand(rows, 1, RECORD))
    keys.masks.index(stage).store(gl.where(rows.valid, 0.0, -float("inf")))
    fence_async_shared()
    rings.arrive(keys.full, turn)
