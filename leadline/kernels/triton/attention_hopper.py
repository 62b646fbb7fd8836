"""Attention by Hopper's tensor cores: stages of a pipeline in warpgroups of their own.

One warpgroup loads and expands records into a ring of blocks of 32 keys (kernels.md 8.4), one
multiplies queries with them and takes the softmax, two multiply its weights with half of the
channels each. So records are on their way, a block is expanded, another scored and a third summed
at the same time. This needs wgmma, setmaxnreg and mbarriers, thus Gluon and compute capability 9.0;
``attention`` says what runs elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from leadline.kernels.triton import unpack_hopper as unpack
from leadline.kernels.triton.unpack import UNIT

HEADS = 64
"""Of a program; fewer are computed as if the last were there several times."""

WIDTH, ROTATED = 512, 64
"""Channels, and those of them that turn, that the kernel is made for."""

_HEADS, _WIDTH = gl.constexpr(HEADS), gl.constexpr(WIDTH)
_KEYS, _HALF = unpack.KEYS, unpack.HALF
_STAGES = gl.constexpr(4)
_LOG2_E = gl.constexpr(1.4426950408889634)
_SLACK = gl.constexpr(24.0)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_OF_SCORES = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
_OF_SUMS = gl.constexpr(gl.SliceLayout(1, _SUMS.value))
_COALESCED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_BF16 = gl.constexpr(gl.NVMMASharedLayout(128, 16))
_PAIRS = gl.constexpr(gl.NVMMASharedLayout(128, 32))
_WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(64, 16))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class _Work(NamedTuple):
    """Rows of a program, a block of heads and a range of key blocks of each."""

    num_rows: Any
    num_heads: Any
    first: Any  # key block of a row
    blocks: Any  # of keys, rounded up to an even number


class _Keys(NamedTuple):
    """A ring of expanded blocks, in halves, and what to add to their scores."""

    blocks: Any
    masks: Any
    full: Any
    empty: Any


class _Weights(NamedTuple):
    """A ring of two blocks' softmax weights, and the factors of sums before them."""

    blocks: Any
    shrinks: Any
    shrunk: Any
    full: Any
    empty: Any


class _Records(NamedTuple):
    """A cache of pages, and which of its rows each query row attends to."""

    words: Any
    scales: Any
    indices: Any
    row: Any  # stride of indices
    limit: Any  # where the split's indices end


@dataclass(frozen=True)
class _Format:
    """How a cache lies in memory; strides count words and scales."""

    record: gl.constexpr
    per_page: int
    page: int
    place: int
    scales_of_page: int
    scales_of_place: int


@gluon.constexpr_function
def _format(record, *numbers):
    return _Format(gl.constexpr(record), *numbers)


class _Pages(NamedTuple):
    """Page tables of requests, and the request of each row."""

    table: Any
    row: Any
    req_of_row: Any


class _Ends(NamedTuple):
    """Tensors of a row's beginning and end."""

    q: Any
    cos: Any
    sin: Any
    sink: Any
    out: Any
    partial: Any
    tops: Any
    totals: Any


@gluon.jit(
    do_not_specialize=[
        "num_rows",
        "num_heads",
        "num_window",
        "window_row",
        "table_row",
        "num_selected",
        "selected_row",
        "parts_per_split",
    ]
)
def attend(
    q,
    cos,
    sin,
    window_values,
    window_scales,
    window_index,
    entry_values,
    entry_scales,
    page_table,
    req_of_row,
    selected,
    sink,
    out,
    partial,
    tops,
    totals,
    num_rows,
    num_heads,
    q_row,
    q_head,
    num_window,
    window_row,
    table_row,
    num_selected,
    selected_row,
    parts_per_split,
    WINDOW: gl.constexpr,
    WINDOW_STRIDE: gl.constexpr,
    WINDOW_SCALES: gl.constexpr,
    ENTRIES: gl.constexpr,
    PER_PAGE: gl.constexpr,
    PAGE_STRIDE: gl.constexpr,
    ENTRY_STRIDE: gl.constexpr,
    PAGE_SCALES: gl.constexpr,
    ENTRY_SCALES: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """One split of 64 heads of some rows: the arguments of ``attention``'s portable kernel."""
    window_blocks = (num_window + _KEYS - 1) // _KEYS
    num_blocks = window_blocks + (num_selected + _KEYS - 1) // _KEYS
    first = gl.program_id(1) * parts_per_split
    blocks = (gl.minimum(parts_per_split, num_blocks - first) + 1) // 2 * 2
    work = _Work(num_rows, num_heads, first, blocks)
    ends = _Ends(q, cos, sin, sink, out, partial, tops, totals)
    query = gl.allocate_shared_memory(gl.bfloat16, [1, _HEADS, _WIDTH], _BF16)
    keys = _Keys(
        gl.allocate_shared_memory(gl.int32, [2 * _STAGES, _KEYS, _HALF // 2], _PAIRS),
        gl.allocate_shared_memory(gl.float32, [_STAGES, _KEYS], _VECTOR),
        _barriers(_STAGES, 1),
        _barriers(_STAGES, 2),
    )
    weights = _Weights(
        gl.allocate_shared_memory(gl.bfloat16, [2, _HEADS, _KEYS], _WEIGHTS),
        gl.allocate_shared_memory(gl.float32, [2, _HEADS], _VECTOR),
        gl.allocate_shared_memory(gl.int32, [2, 1], _VECTOR),
        _barriers(2, 1),
        _barriers(2, 2),
    )
    window = _Records(
        window_values,
        window_scales,
        window_index,
        window_row,
        gl.minimum((first + parts_per_split) * _KEYS, num_window),
    )
    entries = _Records(
        entry_values,
        entry_scales,
        selected,
        selected_row,
        gl.minimum((first + parts_per_split - window_blocks) * _KEYS, num_selected),
    )
    # Each row of a window is a page.
    WINDOW_FORMAT: gl.constexpr = _format(WINDOW, 1, WINDOW_STRIDE, 0, WINDOW_SCALES, 0)
    FORMAT: gl.constexpr = _format(
        ENTRIES, PER_PAGE, PAGE_STRIDE, ENTRY_STRIDE, PAGE_SCALES, ENTRY_SCALES
    )
    pages = _Pages(page_table, table_row, req_of_row)
    gl.warp_specialize(
        [
            (_score, (query, keys, weights, ends, work, q_row, q_head, SPLIT)),
            (_sum, (0, keys, weights, ends, work, SPLIT)),
            (_sum, (1, keys, weights, ends, work, SPLIT)),
            (
                _load,
                (
                    keys,
                    work,
                    window,
                    entries,
                    pages,
                    window_blocks,
                    WINDOW_FORMAT,
                    FORMAT,
                ),
            ),
        ],
        [4, 4, 4],
        [160, 160, 96],
    )


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _wait_full(full, turn):
    """Until the ring's stage of this turn is filled."""
    stages: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(turn % stages), (turn // stages) & 1)


@gluon.jit
def _wait_empty(empty, turn):
    """Until the ring's stage of this turn was used up; at once in the first round."""
    stages: gl.constexpr = empty.shape[0]
    mbarrier.wait(empty.index(turn % stages), ((turn // stages) & 1) ^ 1)


@gluon.jit
def _arrive(barriers, turn):
    mbarrier.arrive(barriers.index(turn % barriers.shape[0]))


@gluon.jit
def _load(
    keys,
    work,
    window,
    entries,
    pages,
    window_blocks,
    WINDOW: gl.constexpr,
    ENTRIES: gl.constexpr,
):
    """Expanded blocks of keys into shared memory."""
    begin = work.first
    end = begin + work.blocks
    window_end = end
    if ENTRIES.record != "none":
        window_end = gl.minimum(end, window_blocks)
    turn = 0
    for row_number in range(gl.program_id(0), work.num_rows, gl.num_programs(0)):
        row = row_number.to(gl.int64)
        turn = _stream(window, pages.table, row, begin, window_end, keys, turn, WINDOW)
        if ENTRIES.record != "none":
            table = pages.table + gl.load(pages.req_of_row + row).to(gl.int64) * pages.row
            begin_entry = gl.maximum(begin - window_blocks, 0)
            turn = _stream(
                entries, table, row, begin_entry, end - window_blocks, keys, turn, ENTRIES
            )


@gluon.jit
def _start_query(query, ends, row, num_heads, q_row, q_head):
    """Begin to copy a row's queries into shared memory."""
    head = gl.program_id(2) * _HEADS + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _COALESCED))
    at = ends.q + row * q_row + gl.minimum(head, num_heads - 1)[:, None] * q_head
    channel = gl.arange(0, _WIDTH, layout=gl.SliceLayout(0, _COALESCED))
    async_copy.async_copy_global_to_shared(query.index(0), at + channel[None, :])
    async_copy.commit_group()


@gluon.jit
def _finish_query(query, ends, row):
    """Turn the last channels of queries that were copied."""
    async_copy.wait_group(0)
    parts = query._reinterpret(gl.bfloat16, [_WIDTH // 64, _HEADS, 64], _BF16)
    last = parts.index(_WIDTH // 64 - 1)
    turned = _rotate(last.load(_COALESCED).to(gl.float32), ends.cos, ends.sin, row, False)
    last.store(turned.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _stream(records, table, row, begin, end, keys, turn, FORMAT: gl.constexpr):
    """Some of a row's blocks through the ring; the loads of two are always on their way."""
    even = _indices(records, row, begin, FORMAT.record)
    odd = _indices(records, row, begin + 1, FORMAT.record)
    even_rows = _load_rows(records, even, _pages_of(table, even, FORMAT), FORMAT)
    odd_rows = _load_rows(records, odd, _pages_of(table, odd, FORMAT), FORMAT)
    even = _indices(records, row, begin + 2, FORMAT.record)
    odd = _indices(records, row, begin + 3, FORMAT.record)
    for block in range(begin, end, 2):
        page = _pages_of(table, even, FORMAT)
        _expand(even_rows, keys, turn, FORMAT.record)
        even_rows = _load_rows(records, even, page, FORMAT)
        even = _indices(records, row, block + 4, FORMAT.record)
        page = _pages_of(table, odd, FORMAT)
        turn += 1
        if block + 1 < end:
            _expand(odd_rows, keys, turn, FORMAT.record)
            turn += 1
        odd_rows = _load_rows(records, odd, page, FORMAT)
        odd = _indices(records, row, block + 5, FORMAT.record)
    return turn


@gluon.jit
def _indices(records, row, block, RECORD: gl.constexpr):
    """A block's indices, -1 behind the limit."""
    slot = block * _KEYS + gl.arange(0, _KEYS, layout=unpack.of_keys(RECORD))
    at = records.indices + row * records.row + slot
    return gl.load(at, mask=slot < records.limit, other=-1).to(gl.int32)


@gluon.jit
def _pages_of(table, index, FORMAT: gl.constexpr):
    page = index
    if FORMAT.per_page > 1:
        at = table + gl.maximum(index, 0) // FORMAT.per_page
        page = gl.load(at, mask=index >= 0, other=0)
    return page.to(gl.int64)


@gluon.jit
def _load_rows(records, index, page, FORMAT: gl.constexpr):
    place = gl.maximum(index, 0) % FORMAT.per_page
    values = records.words + (page * FORMAT.page + place * FORMAT.place)
    scales = records.scales + (page * FORMAT.scales_of_page + place * FORMAT.scales_of_place)
    return unpack.load_rows(values, scales, index >= 0, FORMAT.record)


@gluon.jit
def _expand(rows, keys, turn, RECORD: gl.constexpr):
    """A block into its stage of the ring, once that is free."""
    _wait_empty(keys.empty, turn)
    stage = turn % _STAGES
    keys.blocks.index(2 * stage).store(unpack.expand(rows.left, rows.left_codes, RECORD))
    keys.blocks.index(2 * stage + 1).store(unpack.expand(rows.right, rows.right_codes, RECORD))
    keys.masks.index(stage).store(gl.where(rows.valid, 0.0, -float("inf")))
    fence_async_shared()
    _arrive(keys.full, turn)


@gluon.jit
def _score(query, keys, weights, ends, work, q_row, q_head, SPLIT: gl.constexpr):
    """Scores and their softmax: a block is multiplied while the one before is normalised."""
    head = gl.program_id(2) * _HEADS + gl.arange(0, _HEADS, layout=_OF_SCORES)
    is_head = head < work.num_heads
    first_row = gl.program_id(0).to(gl.int64)
    _start_query(query, ends, first_row, work.num_heads, q_row, q_head)
    turn = 0
    weights_turn = 0
    for row_number in range(gl.program_id(0), work.num_rows, gl.num_programs(0)):
        row = row_number.to(gl.int64)
        top = gl.full([_HEADS], -1e30, gl.float32, _OF_SCORES)
        total = gl.zeros([_HEADS], gl.float32, _OF_SCORES)
        _finish_query(query, ends, row)
        even = _multiply(query, keys, turn)
        for _ in range(work.blocks // 2 - 1):
            scores = warpgroup_mma_wait(0, deps=(even,))
            odd = _multiply(query, keys, turn + 1)
            top, total = _weigh(scores, top, total, keys, weights, turn, weights_turn)
            scores = warpgroup_mma_wait(0, deps=(odd,))
            even = _multiply(query, keys, turn + 2)
            top, total = _weigh(scores, top, total, keys, weights, turn + 1, weights_turn + 1)
            turn += 2
            weights_turn += 2
        scores = warpgroup_mma_wait(0, deps=(even,))
        odd = _multiply(query, keys, turn + 1)
        top, total = _weigh(scores, top, total, keys, weights, turn, weights_turn)
        scores = warpgroup_mma_wait(0, deps=(odd,))
        following = row + gl.num_programs(0)
        if following < work.num_rows:
            _start_query(query, ends, following, work.num_heads, q_row, q_head)
        top, total = _weigh(scores, top, total, keys, weights, turn + 1, weights_turn + 1)
        turn += 2
        weights_turn += 2
        if SPLIT:
            at = (row * gl.num_programs(1) + gl.program_id(1)) * work.num_heads + head
            gl.store(ends.tops + at, top, mask=is_head)
            gl.store(ends.totals + at, total, mask=is_head)
        else:
            bias = gl.load(ends.sink + head, mask=is_head, other=0.0)
            bias = gl.minimum(bias * _LOG2_E, 1e30)
            highest = gl.maximum(top, bias)
            shrink = gl.exp2(top - highest)
            denominator = (total * shrink + gl.exp2(bias - highest)) * UNIT
            # Without a key and a sink there is none, and nothing to divide.
            factor = shrink / gl.where(denominator == 0, 1.0, denominator)
            _wait_empty(weights.empty, weights_turn)
            weights.shrinks.index(weights_turn % 2).store(factor)
            _arrive(weights.full, weights_turn)
            weights_turn += 1


@gluon.jit
def _multiply(query, keys, turn):
    """Start the products of all queries with a block of keys."""
    _wait_full(keys.full, turn)
    block = keys.blocks._reinterpret(gl.bfloat16, [_STAGES, _KEYS, _WIDTH], _BF16)
    block = block.index(turn % _STAGES).permute((1, 0))
    # An index of 0 that the compiler does not see: it would keep 32 descriptors in registers.
    values = query.index(turn // 2**30)
    scores = gl.zeros([_HEADS, _KEYS], gl.float32, _SCORES)
    return warpgroup_mma(values, block, scores, use_acc=False, is_async=True)


@gluon.jit
def _weigh(scores, top, total, keys, weights, turn, weights_turn):
    """A block's softmax, for the warpgroups that sum.

    Weights may pass one: bf16 and float32 are as exact there. Sums follow the maximum only where
    scores rise by more than ``_SLACK`` octaves, so that they are seldom multiplied.
    """
    factor: gl.constexpr = _LOG2_E / (_WIDTH**0.5 * UNIT)
    mask = keys.masks.index(turn % _STAGES).load(gl.SliceLayout(0, _SCORES))
    scores = scores * factor + mask[None, :]
    highest = gl.max(scores, axis=1)
    rises = gl.max(highest - top, axis=0) > _SLACK
    stage = weights_turn % 2
    _wait_empty(weights.empty, weights_turn)
    if rises:
        highest = gl.maximum(top, highest)
        shrink = gl.exp2(top - highest)
        weights.shrinks.index(stage).store(shrink)
        top = highest
        total = total * shrink
    exact = gl.exp2(scores - top[:, None])
    weights.blocks.index(stage).store(exact.to(gl.bfloat16))
    weights.shrunk.index(stage).store(gl.full([1], 0, gl.int32, _ONE) + rises.to(gl.int32))
    fence_async_shared()
    _arrive(weights.full, weights_turn)
    return top, total + gl.sum(exact, axis=1)


@gluon.jit
def _sum(SIDE: gl.constexpr, keys, weights, ends, work, SPLIT: gl.constexpr):
    """Half of the channels of the weighted sums."""
    halves = keys.blocks._reinterpret(gl.bfloat16, [2 * _STAGES, _KEYS, _HALF], _BF16)
    turn = 0
    weights_turn = 0
    for row_number in range(gl.program_id(0), work.num_rows, gl.num_programs(0)):
        row = row_number.to(gl.int64)
        sums = gl.zeros([_HEADS, _HALF], gl.float32, _SUMS)
        for _ in range(work.blocks):
            stage = weights_turn % 2
            _wait_full(weights.full, weights_turn)
            if gl.max(weights.shrunk.index(stage).load(_ONE), axis=0) > 0:
                sums = sums * weights.shrinks.index(stage).load(_OF_SUMS)[:, None]
            values = halves.index(2 * (turn % _STAGES) + SIDE)
            sums = warpgroup_mma(weights.blocks.index(stage), values, sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            _arrive(weights.empty, weights_turn)
            _arrive(keys.empty, turn)
            turn += 1
            weights_turn += 1
        if SPLIT:
            _store_partial(sums, ends.partial, row, work.num_heads, SIDE)
        else:
            _wait_full(weights.full, weights_turn)
            factor = weights.shrinks.index(weights_turn % 2).load(_OF_SUMS)
            _arrive(weights.empty, weights_turn)
            weights_turn += 1
            _store(sums * factor[:, None], ends, row, work.num_heads, SIDE)


@gluon.jit
def _store_partial(sums, partial, row, num_heads, SIDE: gl.constexpr):
    head = gl.program_id(2) * _HEADS + gl.arange(0, _HEADS, layout=_OF_SUMS)
    channel = SIDE * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(0, _SUMS))
    at = (row * gl.num_programs(1) + gl.program_id(1)) * num_heads + head
    at = partial + at[:, None] * _WIDTH + channel[None, :]
    gl.store(at, sums, mask=(head < num_heads)[:, None])


@gluon.jit
def _store(x, ends, row, num_heads, SIDE: gl.constexpr):
    """Half of a row's outputs, 64 channels at a time; the last of all are turned back."""
    head = gl.program_id(2) * _HEADS + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _COALESCED))
    channel = SIDE * _HALF + gl.arange(0, 64, layout=gl.SliceLayout(0, _COALESCED))
    at = ends.out + (row * num_heads + head[:, None]) * _WIDTH + channel[None, :]
    left, right = _halves(x)
    a, b = _halves(left)
    c, d = _halves(right)
    if SIDE == 1:
        d = _rotate(d, ends.cos, ends.sin, row, True)
    parts = (a, b, c, d)
    for part in gl.static_range(4):
        value = gl.convert_layout(parts[part].to(gl.bfloat16), _COALESCED)
        gl.store(at + part * 64, value, mask=(head < num_heads)[:, None])


@gluon.jit
def _halves(x):
    """Left and right columns, which each thread has of its own."""
    return gl.split(gl.permute(gl.reshape(x, [_HEADS, 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def _rotate(x, cos, sin, row, BACK: gl.constexpr):
    """Adjacent channels of ``[n, 64]`` as complex numbers, turned or turned back."""
    pairs: gl.constexpr = x.shape[1] // 2
    even, odd = gl.split(gl.reshape(x, [x.shape[0], pairs, 2]))
    pair = row * pairs + gl.arange(0, pairs, layout=gl.SliceLayout(0, even.type.layout))
    turn_cos, turn_sin = gl.load(cos + pair)[None, :], gl.load(sin + pair)[None, :]
    if BACK:
        turn_sin = -turn_sin
    turned = gl.join(even * turn_cos - odd * turn_sin, even * turn_sin + odd * turn_cos)
    return gl.convert_layout(gl.reshape(turned, x.shape), x.type.layout)
