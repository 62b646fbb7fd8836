"""Attention over window rows and selected entries on Hopper's tensor cores (kernels.md 8.4).

A program has four warpgroups: two gather and expand records into shared memory, a ring of blocks of
32 keys; one computes all scores, their softmax and the left half of the sums, one the right half.
So a block's scores are multiplied while the block before it is normalised, and records are on their
way all the time.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_KEYS = gl.constexpr(32)
_HEADS = gl.constexpr(64)
_WIDTH = gl.constexpr(512)
_HALF = gl.constexpr(256)
_STAGES = gl.constexpr(4)
_LOG2_E = gl.constexpr(1.4426950408889634)
_UNIT = gl.constexpr(2.0**-16)
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_ROWS = gl.constexpr(gl.NVMMASharedLayout(128, 16))
_ROWS32 = gl.constexpr(gl.NVMMASharedLayout(128, 32))
_WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(64, 16))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_SLACK = gl.constexpr(24.0)  # octaves that scores may pass the maximum that counts
_COALESCED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

_EXPAND_FP4 = gl.constexpr("""
{
    .reg .b32 x, y, s, m;
    shl.b32 x, $4, 12;
    prmt.b32 x, $4, x, 0x7610;
    shr.u32 y, $4, 16;
    shr.u32 s, $4, 4;
    prmt.b32 y, y, s, 0x7610;
    shl.b32 s, x, 12;
    shl.b32 m, x, 6;
    and.b32 s, s, 0x80008000;
    lop3.b32 m, m, 0x01C001C0, s, 0xEA;
    mul.rn.bf16x2 $0, m, $5;
    shl.b32 s, x, 4;
    shr.u32 m, x, 2;
    and.b32 s, s, 0x80008000;
    lop3.b32 m, m, 0x01C001C0, s, 0xEA;
    mul.rn.bf16x2 $1, m, $5;
    shl.b32 s, y, 12;
    shl.b32 m, y, 6;
    and.b32 s, s, 0x80008000;
    lop3.b32 m, m, 0x01C001C0, s, 0xEA;
    mul.rn.bf16x2 $2, m, $5;
    shl.b32 s, y, 4;
    shr.u32 m, y, 2;
    and.b32 s, s, 0x80008000;
    lop3.b32 m, m, 0x01C001C0, s, 0xEA;
    mul.rn.bf16x2 $3, m, $5;
}
""")
_EXPAND_FP8 = gl.constexpr("""
{
    .reg .b32 x, s, m;
    prmt.b32 x, $2, 0, 0x1404;
    shr.u32 m, x, 4;
    and.b32 s, x, 0x80008000;
    lop3.b32 m, m, 0x07F007F0, s, 0xEA;
    mul.rn.bf16x2 $0, m, $3;
    prmt.b32 x, $2, 0, 0x3424;
    shr.u32 m, x, 4;
    and.b32 s, x, 0x80008000;
    lop3.b32 m, m, 0x07F007F0, s, 0xEA;
    mul.rn.bf16x2 $1, m, $3;
}
""")


@gluon.constexpr_function
def _words_of(record):
    """32-bit words of half a row."""
    return {"fp4_16": 32, "fp8_32": 64, "bfloat16": 128}[record]


@gluon.constexpr_function
def _blocks_of(record):
    """Scales of half a row."""
    return {"fp4_16": 16, "fp8_32": 8, "bfloat16": 8}[record]


@gluon.constexpr_function
def _bases(record, blocks):
    """Bases of words ``[keys, words]``; with blocks, of ``[keys, blocks, words / blocks]``."""
    words = _words_of(record)
    inner = words // blocks

    def base(word):
        return [0, word] if blocks == 1 else [0, word // inner, word % inner]

    def key(k):
        return [k, 0] if blocks == 1 else [k, 0, 0]

    bits = [1 << b for b in range(4, words.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[base(word) for word in (1, 2, *bits)],
        lane_bases=[key(1), key(2), key(4), base(4), base(8)],
        warp_bases=[key(8), key(16)],
        block_bases=[],
        shape=[32, words] if blocks == 1 else [32, blocks, inner],
    )


@gluon.jit
def _load_half(values, scales, valid, HALF: gl.constexpr, RECORD: gl.constexpr):
    """Words and scales of the left or right half of rows."""
    layout: gl.constexpr = _bases(RECORD, 1)
    words: gl.constexpr = _words_of(RECORD)
    blocks: gl.constexpr = _blocks_of(RECORD)
    at_key: gl.constexpr = gl.SliceLayout(1, layout)
    word = gl.arange(0, words, layout=gl.SliceLayout(0, layout)) + HALF * words
    inside = gl.convert_layout(valid, at_key)[:, None]
    start = gl.convert_layout(values, at_key)[:, None]
    packed = gl.load(start + word[None, :], mask=inside, other=0)
    codes = packed
    if RECORD != "bfloat16":
        by_block: gl.constexpr = gl.SliceLayout(2, _bases(RECORD, blocks))
        block = gl.arange(0, blocks, layout=gl.SliceLayout(0, by_block)) + HALF * blocks
        key: gl.constexpr = gl.SliceLayout(1, by_block)
        at = gl.convert_layout(scales, key)[:, None] + block[None, :]
        codes = gl.load(at, mask=gl.convert_layout(valid, key)[:, None], other=0)
    return packed, codes


@gluon.jit
def _scales(codes, RECORD: gl.constexpr):
    """Scales ``[keys, blocks]`` as two equal bf16 each, int32, in units of 2^16."""
    if RECORD == "fp4_16":
        code = codes.to(gl.int32)
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        scale = bits.to(gl.float32, bitcast=True) * 1.329227995784916e36 * 2.0**110
        scale = gl.where((code & 0x7F) == 0x7F, float("nan"), scale)
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,r", [scale], gl.int32, True, 1
        )
    else:
        raised = codes.to(gl.int32) + 104
        scale = gl.where(raised > 254, 0x7FC0, raised << 7)
        return scale | (scale << 16)


@gluon.jit
def _expand(packed, codes, RECORD: gl.constexpr):
    """Pairs of bf16 ``[keys, 128]``, int32."""
    layout: gl.constexpr = _bases(RECORD, 1)
    words: gl.constexpr = _words_of(RECORD)
    blocks: gl.constexpr = _blocks_of(RECORD)
    if RECORD == "bfloat16":
        unit = gl.full([_KEYS, words], 0x37803780, gl.int32, layout)  # 2^-16 twice
        pairs = gl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [packed, unit], gl.int32, True, 1
        )
    else:
        scale = gl.expand_dims(_scales(codes, RECORD), 2)
        scale = gl.reshape(scale.broadcast_to([_KEYS, blocks, words // blocks]), [_KEYS, words])
        scale = gl.convert_layout(scale, layout, assert_trivial=True)
        if RECORD == "fp4_16":
            a, b, c, d = gl.inline_asm_elementwise(
                _EXPAND_FP4,
                "=&r,=&r,=&r,=&r,r,r",
                [packed, scale],
                (gl.int32, gl.int32, gl.int32, gl.int32),
                True,
                1,
            )
            pairs = gl.join(gl.join(a, c), gl.join(b, d))
        else:
            a, b = gl.inline_asm_elementwise(
                _EXPAND_FP8, "=&r,=&r,r,r", [packed, scale], (gl.int32, gl.int32), True, 1
            )
            pairs = gl.join(a, b)
    return gl.reshape(pairs, [_KEYS, _HALF // 2])


@gluon.jit
def _publish(keys, masks, k_full, k_empty, t, valid, words, codes, RECORD: gl.constexpr):
    """Expand a block into its stage of the ring, once that is free."""
    stage = t % _STAGES
    mbarrier.wait(k_empty.index(stage), ((t // _STAGES) & 1) ^ 1)
    keys.index(2 * stage).store(_expand(words[0], codes[0], RECORD))
    keys.index(2 * stage + 1).store(_expand(words[1], codes[1], RECORD))
    masks.index(stage).store(gl.where(valid, 0.0, -float("inf")))
    fence_async_shared()
    mbarrier.arrive(k_full.index(stage))


@gluon.jit
def _load_rows(values, scales, valid, RECORD: gl.constexpr):
    left, left_codes = _load_half(values, scales, valid, 0, RECORD)
    right, right_codes = _load_half(values, scales, valid, 1, RECORD)
    return (left, right), (left_codes, right_codes)


@gluon.jit
def _angles(cos, sin, row, layout: gl.constexpr):
    pair = gl.arange(0, 32, layout=layout)
    return gl.load(cos + row * 32 + pair)[None, :], gl.load(sin + row * 32 + pair)[None, :]


@gluon.jit
def _rotate(x, cos, sin, row, BACK: gl.constexpr):
    """Adjacent channels of ``[64, 64]`` as complex numbers, turned or turned back."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], 32, 2]))
    turn_cos, turn_sin = _angles(cos, sin, row, gl.SliceLayout(0, even.type.layout))
    if BACK:
        turn_sin = -turn_sin
    turned = gl.join(even * turn_cos - odd * turn_sin, even * turn_sin + odd * turn_cos)
    return gl.convert_layout(gl.reshape(turned, x.shape), x.type.layout)


@gluon.jit
def _load_query(q, cos, sin, query, row, q_row, q_head):
    """A row's queries into shared memory, rotated."""
    head = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _COALESCED))
    channel = gl.arange(0, 64, layout=gl.SliceLayout(0, _COALESCED))
    at = q + row * q_row + (gl.program_id(2) * _HEADS + head)[:, None] * q_head + channel[None, :]
    chunks = query._reinterpret(gl.bfloat16, [8, _HEADS, 64], _ROWS)
    for c in gl.static_range(7):
        async_copy.async_copy_global_to_shared(chunks.index(c), at + c * 64)
    async_copy.commit_group()
    x = gl.load(at + 448).to(gl.float32)
    chunks.index(7).store(_rotate(x, cos, sin, row, False).to(gl.bfloat16))
    async_copy.wait_group(0)


@gluon.jit
def _window_rows(window_values, window_scales, index, WINDOW: gl.constexpr,
                 WINDOW_STRIDE: gl.constexpr, WINDOW_SCALES: gl.constexpr):
    index = index.to(gl.int64)
    return _load_rows(
        window_values + index * WINDOW_STRIDE, window_scales + index * WINDOW_SCALES, index >= 0,
        WINDOW,
    )


@gluon.jit
def _indices(indices, part, limit, RECORD: gl.constexpr):
    """A block's indices, -1 behind the limit."""
    slot = part * _KEYS + gl.arange(0, _KEYS, layout=gl.SliceLayout(1, _bases(RECORD, 1)))
    return gl.load(indices + slot, mask=slot < limit, other=-1).to(gl.int32)


@gluon.jit
def _pages(table, entry, PER_PAGE: gl.constexpr):
    page = gl.load(table + gl.maximum(entry, 0) // PER_PAGE, mask=entry >= 0, other=0)
    return page.to(gl.int64)


@gluon.jit
def _entry_rows(entry_values, entry_scales, entry, page, ENTRIES: gl.constexpr,
                PER_PAGE: gl.constexpr, PAGE_STRIDE: gl.constexpr, ENTRY_STRIDE: gl.constexpr,
                PAGE_SCALES: gl.constexpr, ENTRY_SCALES: gl.constexpr):
    place = gl.maximum(entry, 0) % PER_PAGE
    return _load_rows(
        entry_values + page * PAGE_STRIDE + place * ENTRY_STRIDE,
        entry_scales + page * PAGE_SCALES + place * ENTRY_SCALES,
        entry >= 0,
        ENTRIES,
    )


@gluon.jit
def _produce(
    query, keys, masks, q_full, q_empty, k_full, k_empty,
    q, cos, sin, window_values, window_scales, window_index, entry_values, entry_scales,
    page_table, req_of_row, selected,
    num_rows, q_row, q_head, num_window, window_row, table_row, num_selected, selected_row,
    parts_per_split, num_parts,
    WINDOW: gl.constexpr, WINDOW_STRIDE: gl.constexpr, WINDOW_SCALES: gl.constexpr,
    ENTRIES: gl.constexpr, PER_PAGE: gl.constexpr, PAGE_STRIDE: gl.constexpr,
    ENTRY_STRIDE: gl.constexpr, PAGE_SCALES: gl.constexpr, ENTRY_SCALES: gl.constexpr,
):
    """Queries and blocks of keys into shared memory. Two blocks of records are on their way."""
    first = gl.program_id(1) * parts_per_split
    num = (gl.minimum(parts_per_split, num_parts - first) + 1) // 2 * 2
    window_parts = (num_window + _KEYS - 1) // _KEYS
    window_limit = gl.minimum((first + parts_per_split) * _KEYS, num_window)
    entry_limit = gl.minimum((first + parts_per_split - window_parts) * _KEYS, num_selected)
    window_stop = first + num
    if ENTRIES != "none":
        window_stop = gl.minimum(window_stop, window_parts)
    entry_begin = gl.maximum(first - window_parts, 0)
    entry_stop = first + num - window_parts
    t = 0
    iteration = 0
    for row_number in range(gl.program_id(0), num_rows, gl.num_programs(0)):
        row = row_number.to(gl.int64)
        indices = window_index + row * window_row
        a = _indices(indices, first, window_limit, WINDOW)
        b = _indices(indices, first + 1, window_limit, WINDOW)
        words_a, codes_a = _window_rows(
            window_values, window_scales, a, WINDOW, WINDOW_STRIDE, WINDOW_SCALES
        )
        mbarrier.wait(q_empty, (iteration & 1) ^ 1)
        _load_query(q, cos, sin, query, row, q_row, q_head)
        fence_async_shared()
        mbarrier.arrive(q_full)
        iteration += 1
        for part in range(first, window_stop):
            _publish(keys, masks, k_full, k_empty, t, a >= 0, words_a, codes_a, WINDOW)
            words_a, codes_a = _window_rows(
                window_values, window_scales, b, WINDOW, WINDOW_STRIDE, WINDOW_SCALES
            )
            a = b
            b = _indices(indices, part + 2, window_limit, WINDOW)
            t += 1
        if ENTRIES != "none":
            chosen = selected + row * selected_row
            table = page_table + gl.load(req_of_row + row).to(gl.int64) * table_row
            a = _indices(chosen, entry_begin, entry_limit, ENTRIES)
            b = _indices(chosen, entry_begin + 1, entry_limit, ENTRIES)
            words_a, codes_a = _entry_rows(
                entry_values, entry_scales, a, _pages(table, a, PER_PAGE), ENTRIES, PER_PAGE,
                PAGE_STRIDE, ENTRY_STRIDE, PAGE_SCALES, ENTRY_SCALES,
            )
            words_b, codes_b = _entry_rows(
                entry_values, entry_scales, b, _pages(table, b, PER_PAGE), ENTRIES, PER_PAGE,
                PAGE_STRIDE, ENTRY_STRIDE, PAGE_SCALES, ENTRY_SCALES,
            )
            next_a = _indices(chosen, entry_begin + 2, entry_limit, ENTRIES)
            next_b = _indices(chosen, entry_begin + 3, entry_limit, ENTRIES)
            for part in range(entry_begin, entry_stop, 2):
                page = _pages(table, next_a, PER_PAGE)
                _publish(keys, masks, k_full, k_empty, t, a >= 0, words_a, codes_a, ENTRIES)
                a = next_a
                words_a, codes_a = _entry_rows(
                    entry_values, entry_scales, a, page, ENTRIES, PER_PAGE,
                    PAGE_STRIDE, ENTRY_STRIDE, PAGE_SCALES, ENTRY_SCALES,
                )
                next_a = _indices(chosen, part + 4, entry_limit, ENTRIES)
                page = _pages(table, next_b, PER_PAGE)
                t += 1
                if part + 1 < entry_stop:
                    _publish(keys, masks, k_full, k_empty, t, b >= 0, words_b, codes_b, ENTRIES)
                    t += 1
                b = next_b
                words_b, codes_b = _entry_rows(
                    entry_values, entry_scales, b, page, ENTRIES, PER_PAGE,
                    PAGE_STRIDE, ENTRY_STRIDE, PAGE_SCALES, ENTRY_SCALES,
                )
                next_b = _indices(chosen, part + 5, entry_limit, ENTRIES)


@gluon.jit
def _score(query, keys, k_full, t):
    """Start the products of all queries with a block of keys."""
    stage = t % _STAGES
    mbarrier.wait(k_full.index(stage), (t // _STAGES) & 1)
    block = keys._reinterpret(gl.bfloat16, [_STAGES, _KEYS, _WIDTH], _ROWS).index(stage)
    scores = gl.zeros([_HEADS, _KEYS], gl.float32, _SCORES)
    query = query.index(t // 2**30)
    return warpgroup_mma(query, block.permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def _weigh(
    scores, top, total, masks, weights_of, shrinks_of, shrunk, p_full, p_empty, t, turn
):
    """A block's softmax, for the warpgroups that sum.

    Weights may exceed one: bf16 and float32 are as exact there. So sums are taken to a new maximum
    only where it would be out of hand, which leaves the other warpgroups little to multiply.
    """
    factor: gl.constexpr = _LOG2_E / (_WIDTH**0.5 * _UNIT)
    mask = masks.index(t % _STAGES).load(gl.SliceLayout(0, _SCORES))
    scores = scores * factor + mask[None, :]
    highest = gl.max(scores, axis=1)
    place = turn % 2
    rises = gl.max(highest - top, axis=0) > _SLACK
    mbarrier.wait(p_empty.index(place), ((turn // 2) & 1) ^ 1)
    if rises:
        highest = gl.maximum(top, highest)
        shrink = gl.exp2(top - highest)
        shrinks_of.index(place).store(shrink)
        top = highest
        total = total * shrink
    exact = gl.exp2(scores - top[:, None])
    weights_of.index(place).store(exact.to(gl.bfloat16))
    shrunk.index(place).store(gl.full([1], 0, gl.int32, _ONE) + rises.to(gl.int32))
    fence_async_shared()
    mbarrier.arrive(p_full.index(place))
    return top, total + gl.sum(exact, axis=1)


@gluon.jit
def _store_chunk(x, at, cos, sin, row, ROTATE: gl.constexpr):
    if ROTATE:
        x = _rotate(x, cos, sin, row, True)
    gl.store(at, gl.convert_layout(x.to(gl.bfloat16), _COALESCED))


@gluon.jit
def _halves(x):
    """Left and right columns, by registers only."""
    return gl.split(gl.permute(gl.reshape(x, [_HEADS, 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def _store(sums, factor, out, partial, cos, sin, row, num_heads, SIDE: gl.constexpr,
           SPLIT: gl.constexpr):
    if SPLIT:
        head = gl.program_id(2) * _HEADS + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _SUMS))
        channel = SIDE * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(0, _SUMS))
        place = (row * gl.num_programs(1) + gl.program_id(1)) * num_heads + head
        gl.store(partial + place[:, None] * _WIDTH + channel[None, :], sums)
    else:
        head = gl.program_id(2) * _HEADS + gl.arange(
            0, _HEADS, layout=gl.SliceLayout(1, _COALESCED)
        )
        channel = SIDE * _HALF + gl.arange(0, 64, layout=gl.SliceLayout(0, _COALESCED))
        at = out + (row * num_heads + head[:, None]) * _WIDTH + channel[None, :]
        a, b = _halves(sums * factor[:, None])
        c, d = _halves(a)
        _store_chunk(c, at, cos, sin, row, False)
        _store_chunk(d, at + 64, cos, sin, row, False)
        c, d = _halves(b)
        _store_chunk(c, at + 128, cos, sin, row, False)
        _store_chunk(d, at + 192, cos, sin, row, SIDE == 1)


@gluon.jit
def _attend(
    query, keys, masks, weights_of, shrinks_of, shrunk, q_full, q_empty, k_full, p_full, p_empty,
    tops, totals, sink, num_rows, num_heads, parts_per_split, num_parts, SPLIT: gl.constexpr,
):
    """Scores and their softmax."""
    first = gl.program_id(1) * parts_per_split
    num = (gl.minimum(parts_per_split, num_parts - first) + 1) // 2 * 2
    of_scores: gl.constexpr = gl.SliceLayout(1, _SCORES)
    head = gl.program_id(2) * _HEADS + gl.arange(0, _HEADS, layout=of_scores)
    t = 0
    turn = 0
    iteration = 0
    for row_number in range(gl.program_id(0), num_rows, gl.num_programs(0)):
        row = row_number.to(gl.int64)
        top = gl.full([_HEADS], -1e30, gl.float32, of_scores)
        total = gl.zeros([_HEADS], gl.float32, of_scores)
        mbarrier.wait(q_full, iteration & 1)
        even = _score(query, keys, k_full, t)
        for _ in range(num // 2 - 1):
            scores = warpgroup_mma_wait(0, deps=(even,))
            odd = _score(query, keys, k_full, t + 1)
            top, total = _weigh(
                scores, top, total, masks, weights_of, shrinks_of, shrunk, p_full, p_empty, t, turn
            )
            scores = warpgroup_mma_wait(0, deps=(odd,))
            even = _score(query, keys, k_full, t + 2)
            top, total = _weigh(
                scores, top, total, masks, weights_of, shrinks_of, shrunk, p_full, p_empty, t + 1, turn + 1
            )
            t += 2
            turn += 2
        scores = warpgroup_mma_wait(0, deps=(even,))
        odd = _score(query, keys, k_full, t + 1)
        top, total = _weigh(
            scores, top, total, masks, weights_of, shrinks_of, shrunk, p_full, p_empty, t, turn
        )
        scores = warpgroup_mma_wait(0, deps=(odd,))
        mbarrier.arrive(q_empty)
        top, total = _weigh(
            scores, top, total, masks, weights_of, shrinks_of, shrunk, p_full, p_empty, t + 1, turn + 1
        )
        t += 2
        turn += 2
        if SPLIT:
            at = (row * gl.num_programs(1) + gl.program_id(1)) * num_heads + head
            gl.store(tops + at, top)
            gl.store(totals + at, total)
        else:
            bias = gl.minimum(gl.load(sink + head) * _LOG2_E, 1e30)
            highest = gl.maximum(top, bias)
            shrink = gl.exp2(top - highest)
            denominator = (total * shrink + gl.exp2(bias - highest)) * _UNIT
            place = turn % 2
            mbarrier.wait(p_empty.index(place), ((turn // 2) & 1) ^ 1)
            shrinks_of.index(place).store(shrink / gl.where(denominator == 0, 1.0, denominator))
            mbarrier.arrive(p_full.index(place))
            turn += 1
        iteration += 1


@gluon.jit
def _sum(
    SIDE: gl.constexpr, keys, weights_of, shrinks_of, shrunk, k_empty, p_full, p_empty,
    out, partial, cos, sin, num_rows, num_heads, parts_per_split, num_parts, SPLIT: gl.constexpr,
):
    """Half of the channels of the weighted sums."""
    first = gl.program_id(1) * parts_per_split
    num = (gl.minimum(parts_per_split, num_parts - first) + 1) // 2 * 2
    halves = keys._reinterpret(gl.bfloat16, [2 * _STAGES, _KEYS, _HALF], _ROWS)
    t = 0
    turn = 0
    for row_number in range(gl.program_id(0), num_rows, gl.num_programs(0)):
        row = row_number.to(gl.int64)
        sums = gl.zeros([_HEADS, _HALF], gl.float32, _SUMS)
        for _ in range(num):
            stage = t % _STAGES
            place = turn % 2
            mbarrier.wait(p_full.index(place), (turn // 2) & 1)
            if gl.max(shrunk.index(place).load(_ONE), axis=0) > 0:
                sums = sums * shrinks_of.index(place).load(gl.SliceLayout(1, _SUMS))[:, None]
            values = halves.index(2 * stage + SIDE)
            sums = warpgroup_mma(weights_of.index(place), values, sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(p_empty.index(place))
            mbarrier.arrive(k_empty.index(stage))
            t += 1
            turn += 1
        factor = gl.zeros([_HEADS], gl.float32, gl.SliceLayout(1, _SUMS))
        if not SPLIT:
            place = turn % 2
            mbarrier.wait(p_full.index(place), (turn // 2) & 1)
            factor = shrinks_of.index(place).load(gl.SliceLayout(1, _SUMS))
            mbarrier.arrive(p_empty.index(place))
            turn += 1
        _store(sums, factor, out, partial, cos, sin, row, num_heads, SIDE, SPLIT)


@gluon.jit(
    do_not_specialize=[
        "num_rows", "num_heads", "num_window", "window_row", "table_row", "num_selected",
        "selected_row", "parts_per_split", "num_parts",
    ]
)
def attend(
    q, cos, sin, window_values, window_scales, window_index, entry_values, entry_scales,
    page_table, req_of_row, selected, sink, out, partial, tops, totals,
    num_rows, num_heads, q_row, q_head, num_window, window_row, table_row,
    num_selected, selected_row, parts_per_split, num_parts,
    WINDOW: gl.constexpr, WINDOW_STRIDE: gl.constexpr, WINDOW_SCALES: gl.constexpr,
    ENTRIES: gl.constexpr, PER_PAGE: gl.constexpr, PAGE_STRIDE: gl.constexpr,
    ENTRY_STRIDE: gl.constexpr, PAGE_SCALES: gl.constexpr, ENTRY_SCALES: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """One split of 64 heads of some rows."""
    query = gl.allocate_shared_memory(gl.bfloat16, [1, _HEADS, _WIDTH], _ROWS)
    keys = gl.allocate_shared_memory(gl.int32, [2 * _STAGES, _KEYS, _HALF // 2], _ROWS32)
    masks = gl.allocate_shared_memory(gl.float32, [_STAGES, _KEYS], _VECTOR)
    weights_of = gl.allocate_shared_memory(gl.bfloat16, [2, _HEADS, _KEYS], _WEIGHTS)
    shrinks_of = gl.allocate_shared_memory(gl.float32, [2, _HEADS], _VECTOR)
    shrunk = gl.allocate_shared_memory(gl.int32, [2, 1], _VECTOR)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    for i in gl.static_range(_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    query, keys, masks, weights_of, shrinks_of, shrunk, q_full, q_empty, k_full, p_full,
                    p_empty, tops, totals, sink, num_rows, num_heads, parts_per_split, num_parts,
                    SPLIT,
                ),
            ),
            (
                _sum,
                (
                    0, keys, weights_of, shrinks_of, shrunk, k_empty, p_full, p_empty,
                    out, partial, cos, sin, num_rows, num_heads, parts_per_split, num_parts, SPLIT,
                ),
            ),
            (
                _sum,
                (
                    1, keys, weights_of, shrinks_of, shrunk, k_empty, p_full, p_empty,
                    out, partial, cos, sin, num_rows, num_heads, parts_per_split, num_parts, SPLIT,
                ),
            ),
            (
                _produce,
                (
                    query, keys, masks, q_full, q_empty, k_full, k_empty,
                    q, cos, sin, window_values, window_scales, window_index, entry_values,
                    entry_scales, page_table, req_of_row, selected,
                    num_rows, q_row, q_head, num_window, window_row, table_row, num_selected,
                    selected_row, parts_per_split, num_parts,
                    WINDOW, WINDOW_STRIDE, WINDOW_SCALES, ENTRIES, PER_PAGE, PAGE_STRIDE,
                    ENTRY_STRIDE, PAGE_SCALES, ENTRY_SCALES,
                ),
            ),
        ],
        [4, 4, 4],
        [160, 160, 96],
    )
