"""Attention by Hopper's tensor cores: stages of a pipeline in warpgroups of their own.

Two warpgroups load and expand blocks of 32 keys in turn, into a ring in shared memory (kernels.md
8.4). One multiplies queries with them, takes the softmax and sums the left half of the channels;
one sums the right half. So records are on their way, blocks are expanded, one is scored and another
summed at the same time. This needs wgmma, setmaxnreg and mbarriers, thus Gluon and compute
capability 9.0; ``attention`` says what runs elsewhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from leadline.kernels.triton import rings
from leadline.kernels.triton.attention_ends import (
    HEADS,
    OF_SUMS,
    SUMS,
    WIDTH,
    Ends,
    finish_query,
    start_query,
    store,
    store_partial,
)
from leadline.kernels.triton.attention_keys import (
    BLOCK,
    HALF,
    STAGES,
    Pages,
    Records,
    Work,
    layout,
    load,
    new_ring,
)
from leadline.kernels.triton.unpack import UNIT

_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)
_SLACK = gl.constexpr(24.0)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_OF_SCORES = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_BF16 = gl.constexpr(gl.NVMMASharedLayout(128, 16))
_WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(64, 16))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class _Weights(NamedTuple):
    """A ring of two blocks' softmax weights, and the factors of sums before them."""

    blocks: Any
    shrinks: Any
    shrunk: Any
    full: Any
    empty: Any


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
    lse,
    codes,
    exponents,
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
    RING: gl.constexpr,
    RING_STRIDE: gl.constexpr,
    ROW_STRIDE: gl.constexpr,
    RING_SCALES: gl.constexpr,
    ROW_SCALES: gl.constexpr,
    ENTRIES: gl.constexpr,
    PER_PAGE: gl.constexpr,
    PAGE_STRIDE: gl.constexpr,
    ENTRY_STRIDE: gl.constexpr,
    PAGE_SCALES: gl.constexpr,
    ENTRY_SCALES: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """One split of 64 heads of some rows: the arguments of ``attention``'s portable kernel."""
    window_blocks = (num_window + BLOCK - 1) // BLOCK
    num_blocks = window_blocks + (num_selected + BLOCK - 1) // BLOCK
    first = gl.program_id(1) * parts_per_split
    blocks = (gl.minimum(parts_per_split, num_blocks - first) + 1) // 2 * 2
    work = Work(num_rows, num_heads, first, blocks, window_blocks)
    ends = Ends(q, cos, sin, sink, out, partial, tops, totals, lse, codes, exponents)
    query = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, WIDTH], _BF16)
    keys = new_ring(2)
    weights = _Weights(
        gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, BLOCK], _WEIGHTS),
        gl.allocate_shared_memory(gl.float32, [2, HEADS], _VECTOR),
        gl.allocate_shared_memory(gl.int32, [2, 1], _VECTOR),
        rings.barriers(2, 1),
        rings.barriers(2, 1),
    )
    window = Records(
        window_values,
        window_scales,
        window_index,
        window_row,
        gl.minimum((first + parts_per_split) * BLOCK, num_window),
    )
    entries = Records(
        entry_values,
        entry_scales,
        selected,
        selected_row,
        gl.minimum((first + parts_per_split - window_blocks) * BLOCK, num_selected),
    )
    # Each row of a window is a page: rows of these records follow one another through all rings.
    WINDOW_LAYOUT: gl.constexpr = layout(WINDOW, 1, ROW_STRIDE, 0, ROW_SCALES, 0)
    LAYOUT: gl.constexpr = layout(
        ENTRIES, PER_PAGE, PAGE_STRIDE, ENTRY_STRIDE, PAGE_SCALES, ENTRY_SCALES
    )
    pages = Pages(page_table, table_row, req_of_row)
    gl.warp_specialize(
        [
            (_score, (query, keys, weights, ends, work, q_row, q_head, SPLIT)),
            (_sum, (keys, weights, ends, work, SPLIT)),
            (load, (0, keys, work, window, entries, pages, WINDOW_LAYOUT, LAYOUT)),
            (load, (1, keys, work, window, entries, pages, WINDOW_LAYOUT, LAYOUT)),
        ],
        [4, 4, 4],
        [160, 72, 72],
    )


@gluon.jit
def _score(query, keys, weights, ends, work, q_row, q_head, SPLIT: gl.constexpr):
    """Scores, their softmax, and the left half of the sums.

    A block is multiplied while the one before is normalised.
    """
    head = gl.program_id(2) * HEADS + gl.arange(0, HEADS, layout=_OF_SCORES)
    is_head = head < work.num_heads
    first_row = gl.program_id(0).to(gl.int64)
    start_query(query, ends, first_row, work.num_heads, q_row, q_head)
    # Carried from row to row, so that none need be cleared while a product is under way.
    sums = gl.zeros([HEADS, HALF], gl.float32, SUMS)
    turn = 0
    weights_turn = 0
    for row_number in range(gl.program_id(0), work.num_rows, gl.num_programs(0)):
        row = gl.cast(row_number, gl.int64)
        top = gl.full([HEADS], -1e30, gl.float32, _OF_SCORES)
        total = gl.zeros([HEADS], gl.float32, _OF_SCORES)
        finish_query(query, ends, row)
        running = warpgroup_mma_init(sums)
        even = _multiply(query, keys, turn)
        for pair in range(work.blocks // 2 - 1):
            odd, running, top, total = _attend_block(
                even, running, top, total, query, keys, weights, turn, weights_turn, pair > 0
            )
            even, running, top, total = _attend_block(
                odd, running, top, total, query, keys, weights, turn + 1, weights_turn + 1, True
            )
            turn += 2
            weights_turn += 2
        odd, running, top, total = _attend_block(
            even, running, top, total, query, keys, weights, turn, weights_turn, work.blocks > 2
        )
        scores, running = warpgroup_mma_wait(0, deps=(odd, running))
        rings.arrive(keys.empty, turn)
        following = row + gl.num_programs(0)
        if following < work.num_rows:
            start_query(query, ends, following, work.num_heads, q_row, q_head)
        turn += 1
        weights_turn += 1
        scores, highest, rises = _octaves(scores, top, keys, turn)
        if rises:
            running, top, total = _follow(running, top, total, highest, weights, weights_turn)
        running, total = _weigh(
            scores, rises, running, top, total, keys, weights, turn, weights_turn, True
        )
        sums = warpgroup_mma_wait(0, deps=(running,))
        rings.arrive(keys.empty, turn)
        turn += 1
        weights_turn += 1
        if SPLIT:
            at = (row * gl.num_programs(1) + gl.program_id(1)) * work.num_heads + head
            gl.store(ends.tops + at, top, mask=is_head)
            gl.store(ends.totals + at, total, mask=is_head)
            store_partial(sums, ends.partial, row, work.num_heads, 0)
        else:
            bias = gl.load(ends.sink + head, mask=is_head, other=0.0)
            bias = gl.minimum(bias * _LOG2_E, 1e30)
            highest = gl.maximum(top, bias)
            shrink = gl.exp2(top - highest)
            denominator = (total * shrink + gl.exp2(bias - highest)) * UNIT
            # Without a key and a sink there is none, and nothing to divide.
            factor = shrink / gl.where(denominator == 0, 1.0, denominator)
            rings.wait_empty(weights.empty, weights_turn)
            weights.shrinks.index(weights_turn % 2).store(factor)
            rings.arrive(weights.full, weights_turn)
            weights_turn += 1
            if ends.lse is not None:
                log_sum = (top + gl.log2(total)) * _LN_2
                gl.store(ends.lse + row * work.num_heads + head, log_sum, mask=is_head)
            factor = gl.convert_layout(factor, OF_SUMS)
            store(sums * factor[:, None], ends, row, work.num_heads, 0)


@gluon.jit
def _multiply(query, keys, turn):
    """Start the products of all queries with a block of keys."""
    rings.wait_full(keys.full, turn)
    block = keys.blocks._reinterpret(gl.bfloat16, [STAGES, BLOCK, WIDTH], _BF16)
    block = block.index(turn % STAGES).permute((1, 0))
    # An index of 0 that the compiler does not see: it would keep 32 descriptors in registers.
    values = query.index(turn // 2**30)
    scores = gl.zeros([HEADS, BLOCK], gl.float32, _SCORES)
    return warpgroup_mma(values, block, scores, use_acc=False, is_async=True)


@gluon.jit
def _attend_block(flight, running, top, total, query, keys, weights, turn, weights_turn, has_sums):
    """Softmax and left sums of a block whose scores are under way; starts those of the next."""
    scores, running = warpgroup_mma_wait(0, deps=(flight, running))
    following = _multiply(query, keys, turn + 1)
    if has_sums:
        rings.arrive(keys.empty, turn + STAGES - 1)
    scores, highest, rises = _octaves(scores, top, keys, turn)
    if rises:  # no accumulator may change while a product is under way
        following = warpgroup_mma_init(warpgroup_mma_wait(0, deps=(following,)))
        running, top, total = _follow(running, top, total, highest, weights, weights_turn)
    running, total = _weigh(
        scores, rises, running, top, total, keys, weights, turn, weights_turn, has_sums
    )
    return following, running, top, total


@gluon.jit
def _octaves(scores, top, keys, turn):
    """Scores of base 2, their maxima, and whether any passed its ``top`` too far.

    Weights may pass one: bf16 and float32 are as exact there. Sums follow the maximum only where
    scores rise by more than ``_SLACK`` octaves, so that they are seldom multiplied.
    """
    factor: gl.constexpr = _LOG2_E / (WIDTH**0.5 * UNIT)
    mask = keys.masks.index(turn % STAGES).load(gl.SliceLayout(0, _SCORES))
    scores = scores * factor + mask[None, :]
    highest = gl.max(scores, axis=1)
    return scores, highest, gl.max(highest - top, axis=0) > _SLACK


@gluon.jit
def _follow(sums, top, total, highest, weights, weights_turn):
    """Sums and totals by a new maximum; its factor for the other warpgroup."""
    rings.wait_empty(weights.empty, weights_turn)
    highest = gl.maximum(top, highest)
    shrink = gl.exp2(top - highest)
    weights.shrinks.index(weights_turn % 2).store(shrink)
    return sums * gl.convert_layout(shrink, OF_SUMS)[:, None], highest, total * shrink


@gluon.jit
def _weigh(scores, rises, sums, top, total, keys, weights, turn, weights_turn, has_sums):
    """A block's weights to the other warpgroup and into the left half of the sums."""
    exact = gl.exp2(scores - top[:, None])
    rounded = exact.to(gl.bfloat16)
    stage = weights_turn % 2
    rings.wait_empty(weights.empty, weights_turn)
    weights.blocks.index(stage).store(rounded)
    weights.shrunk.index(stage).store(gl.full([1], 0, gl.int32, _ONE) + rises.to(gl.int32))
    fence_async_shared()
    rings.arrive(weights.full, weights_turn)
    values = keys.blocks._reinterpret(gl.bfloat16, [2 * STAGES, BLOCK, HALF], _BF16)
    values = values.index(2 * (turn % STAGES))
    rounded = gl.convert_layout(rounded, gl.DotOperandLayout(0, SUMS, 2))
    sums = warpgroup_mma(rounded, values, sums, use_acc=has_sums, is_async=True)
    return sums, total + gl.sum(exact, axis=1)


@gluon.jit
def _sum(keys, weights, ends, work, SPLIT: gl.constexpr):
    """The right half of the sums."""
    halves = keys.blocks._reinterpret(gl.bfloat16, [2 * STAGES, BLOCK, HALF], _BF16)
    turn = 0
    weights_turn = 0
    for row_number in range(gl.program_id(0), work.num_rows, gl.num_programs(0)):
        row = gl.cast(row_number, gl.int64)
        sums = gl.zeros([HEADS, HALF], gl.float32, SUMS)
        for _ in range(work.blocks):
            stage = weights_turn % 2
            rings.wait_full(weights.full, weights_turn)
            if gl.max(weights.shrunk.index(stage).load(_ONE), axis=0) > 0:
                sums = sums * weights.shrinks.index(stage).load(OF_SUMS)[:, None]
            values = halves.index(2 * (turn % STAGES) + 1)
            sums = warpgroup_mma(weights.blocks.index(stage), values, sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            rings.arrive(weights.empty, weights_turn)
            rings.arrive(keys.empty, turn)
            turn += 1
            weights_turn += 1
        if SPLIT:
            store_partial(sums, ends.partial, row, work.num_heads, 1)
        else:
            rings.wait_full(weights.full, weights_turn)
            factor = weights.shrinks.index(weights_turn % 2).load(OF_SUMS)
            rings.arrive(weights.empty, weights_turn)
            weights_turn += 1
            store(sums * factor[:, None], ends, row, work.num_heads, 1)
