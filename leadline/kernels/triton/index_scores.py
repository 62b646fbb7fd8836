"""The kernel of index scores, of everything and of candidates (kernels.md 5.2, 6)."""

from __future__ import annotations

import triton
import triton.language as tl

from leadline.kernels.triton.formats import cast
from leadline.kernels.triton.index_products import key_operand, query_operand, sum_heads
from leadline.kernels.triton.launch import has_ptx


@triton.jit
def score_rows(
    q,
    weights,
    values,
    scales,
    page_table,
    req_of_row,
    blocks,
    visible,
    scores,
    value_stride,
    scale_stride,
    table_stride,
    blocks_stride,
    score_stride,
    num_rows,
    num_columns,
    size_class,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PER_PAGE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    EXACT: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Scores of ROWS rows and a stretch of columns, which are entries, or members of blocks.

    Keys go from memory into the registers that are the tensor cores' left operand, a tile ahead,
    so warps wait for nothing but their own loads. All heads of all rows are the right operand.
    Rows of several requests take a turn for each request.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    request = tl.load(req_of_row + row, mask=live, other=-1).to(tl.int32)
    seen = tl.load(visible + row, mask=live, other=0).to(tl.int32)
    line = scores + row.to(tl.int64) * score_stride
    listed = blocks
    if blocks is not None:
        listed = blocks + tl.program_id(0).to(tl.int64) * blocks_stride
    first = tl.program_id(0) * ROWS
    x, weight = query_operand(q, weights, first, num_rows, ROWS, HEADS, BLOCK_HEADS, DIM, FP8)

    # Above the diagonal nothing is read or written: programs share what the rows may see.
    width = num_columns
    if blocks is None:
        width = tl.max(seen)
    tiles = tl.cdiv(tl.cdiv(width, KEYS), tl.num_programs(1))
    begin = tl.program_id(1) * tiles
    end = tl.minimum(begin + tiles, tl.cdiv(width, KEYS))
    # Eight consecutive keys lie in a warp's lanes, the next in the same lanes' other registers.
    place = tl.arange(0, KEYS)
    place = place % 8 + place // (8 * WARPS) * 8 + place // 8 % WARPS * (KEYS // WARPS)
    WHOLE: tl.constexpr = blocks is None and PER_PAGE % KEYS == 0  # a tile lies in one page
    for turn in tl.range(tl.min(tl.where(live, request, 0x7FFFFFFF)), tl.max(request) + 1):
        mine = live & (request == turn)
        most = tl.max(tl.where(mine, seen, 0))
        limit = most if blocks is None else tl.minimum(most, 1) * num_columns
        scored = tl.maximum(tl.minimum(end, tl.cdiv(limit, KEYS)), begin)
        table = page_table + turn * table_stride
        if begin < scored:
            last = scored - 1
            entry = _entries(listed, begin, place, num_columns, BLOCK_SIZE, WHOLE)
            page = _pages(table, entry, most, KEYS, PER_PAGE, WHOLE)
            words, exponents, absent = _fetch(
                *(values, scales, value_stride, scale_stride),
                *(page, entry, place, most, DIM, PER_PAGE, WHOLE),
            )
            tile = tl.minimum(begin + 1, last)
            entry = _entries(listed, tile, place, num_columns, BLOCK_SIZE, WHOLE)
            page = _pages(table, entry, most, KEYS, PER_PAGE, WHOLE)
            tile = tl.minimum(begin + 2, last)
            later = _entries(listed, tile, place, num_columns, BLOCK_SIZE, WHOLE)
            for tile in tl.range(begin, scored, num_stages=1):
                key, power = key_operand(words, exponents, absent, DIM, FP8)
                next_words, next_exponents, next_absent = _fetch(
                    *(values, scales, value_stride, scale_stride),
                    *(page, entry, place, most, DIM, PER_PAGE, WHOLE),
                )
                entry, page = later, _pages(table, later, most, KEYS, PER_PAGE, WHOLE)
                after = tl.minimum(tile + 3, last)
                later = _entries(listed, after, place, num_columns, BLOCK_SIZE, WHOLE)
                # The tensor cores' rows: eight lanes, a register, warps, other registers.
                key = key.reshape(KEYS // (16 * WARPS), 2, WARPS, 8, DIM).permute(0, 2, 1, 3, 4)
                power = power.reshape(KEYS // (16 * WARPS), 2, WARPS, 8).permute(0, 2, 1, 3)
                score = sum_heads(
                    *(key.reshape(KEYS, DIM), power.reshape(KEYS), x, weight),
                    *(ROWS, BLOCK_HEADS, EXACT, FP8),
                )
                score = score.reshape(KEYS // (16 * WARPS), WARPS, 2, 8, ROWS)
                score = score.permute(0, 2, 1, 3, 4).reshape(KEYS, ROWS)
                column = tile * KEYS + place
                if blocks is None:
                    score = tl.where(column[:, None] < seen[None, :], score, -float("inf"))
                inside = mine[None, :] & (column < num_columns)[:, None]
                _store(line, column, cast(score, scores.dtype.element_ty), inside)
                words, exponents, absent = next_words, next_exponents, next_absent
        if blocks is not None:  # all candidates have a score, also where nothing is visible
            filled = tl.where(tl.max(mine.to(tl.int32)) > 0, end, scored)
            for tile in tl.range(scored, filled):
                column = tile * KEYS + tl.arange(0, KEYS)
                inside = mine[None, :] & (column < num_columns)[:, None]
                tl.store(line[None, :] + column[:, None], -float("inf"), mask=inside)


@triton.jit
def _entries(listed, tile, place, num_columns, BLOCK_SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """Entries ``[KEYS]`` of a tile, negative where there is no block; if WHOLE, the tile."""
    KEYS: tl.constexpr = place.shape[0]
    if WHOLE:
        return tile
    else:  # noqa: RET505  # a compiled function has one type of result
        column = tile * KEYS + place
        if listed is None:
            return column
        else:  # noqa: RET505
            block = _look_up(listed + tl.minimum(column, num_columns - 1) // BLOCK_SIZE)
            return block * BLOCK_SIZE + column % BLOCK_SIZE


@triton.jit
def _pages(table, entry, limit, KEYS: tl.constexpr, PER_PAGE: tl.constexpr, WHOLE: tl.constexpr):
    """Pages of entries; of absent ones, of an entry that exists."""
    if WHOLE:
        return tl.load(table + entry // (PER_PAGE // KEYS)).to(tl.int64)
    else:  # noqa: RET505
        entry = tl.maximum(tl.minimum(entry, limit - 1), 0)
        return _look_up(table + entry // PER_PAGE).to(tl.int64)


@triton.jit
def _look_up(pointers):
    """Small int64 numbers, by the threads that need them; ``tl.load`` would go another way."""
    if has_ptx():
        return tl.inline_asm_elementwise(
            """{
                .reg .b64 number;
                ld.global.nc.b64 number, [$1];
                cvt.u32.u64 $0, number;
            }""",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:  # noqa: RET505
        return tl.load(pointers).to(tl.int32)


@triton.jit
def _fetch(
    values,
    scales,
    value_stride,
    scale_stride,
    page,
    entry,
    place,
    limit,
    DIM: tl.constexpr,
    PER_PAGE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Words and exponents of the keys of a tile, and ``[KEYS, DIM / 32]``: 256 where there is none.

    That lies where the exponents lie; elsewhere it would have to go through shared memory.
    """
    KEYS: tl.constexpr = place.shape[0]
    absent = tl.zeros((KEYS, DIM // 32), tl.int32)
    if WHOLE:
        start = entry % (PER_PAGE // KEYS) * KEYS
        inner = place
    else:
        start = 0
        inner = tl.maximum(tl.minimum(entry, limit - 1), 0)
        absent += tl.where(inner == entry, 0, 256)[:, None]
        inner %= PER_PAGE
    # No more than a byte at a time, or a thread would load the exponents of another's words.
    part = tl.multiple_of(tl.arange(0, DIM // 32), 1)
    words = values + page * value_stride + start * (DIM // 8) + inner * (DIM // 8)
    exponents = scales + page * scale_stride + start * (DIM // 32) + inner * (DIM // 32)
    words = tl.load(words[:, None] + tl.arange(0, DIM // 8)[None, :])
    return words, tl.load(exponents[:, None] + part[None, :]), absent


@triton.jit
def _store(line, column, score, mask):
    """``tl.store``, which would bring scores into another order through shared memory."""
    if has_ptx() and score.dtype == tl.bfloat16:
        line, _ = tl.broadcast(line.to(tl.int64)[None, :], score)
        column, _ = tl.broadcast(column[:, None], score)
        tl.inline_asm_elementwise(
            """{
                .reg .pred stored;
                .reg .b64 at;
                setp.ne.b32 stored, $4, 0;
                mad.wide.s32 at, $2, 2, $1;
                @stored st.global.b16 [at], $3;
                mov.b32 $0, 0;
            }""",
            "=r,l,r,h,r",
            [line, column, score, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(line[None, :] + column[:, None], score, mask=mask)
