"""Index scores of rows that share no keys: decoding, and candidates (kernels.md 5.2, 6)."""

from __future__ import annotations

import triton
import triton.language as tl

from leadline.kernels.triton.formats import cast
from leadline.kernels.triton.index_products import key_operand, query_operand, sum_heads
from leadline.kernels.triton.launch import NATIVE_CASTS


@triton.jit
def decode_logits(
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
    """Scores of a stretch of one row's columns, which are entries, or members of blocks.

    Keys go from memory into the registers that are the tensor cores' operand, a tile ahead, so
    warps wait for nothing but their own loads.
    """
    row = tl.program_id(0).to(tl.int64)
    request = tl.maximum(tl.load(req_of_row + row).to(tl.int32), 0)
    seen = tl.load(visible + row).to(tl.int32)
    table = page_table + request * table_stride
    line = scores + row * score_stride
    listed = blocks
    if blocks is not None:
        listed = blocks + row * blocks_stride
    x, weight = query_operand(q, weights, row, num_rows, 1, HEADS, BLOCK_HEADS, DIM, FP8)

    tiles = tl.cdiv(tl.cdiv(num_columns, KEYS), tl.num_programs(1))
    begin = tl.program_id(1) * tiles
    end = tl.minimum(begin + tiles, tl.cdiv(num_columns, KEYS))
    limit = seen if blocks is None else tl.minimum(seen, 1) * num_columns
    scored = tl.maximum(tl.minimum(end, tl.cdiv(limit, KEYS)), begin)

    # Eight consecutive keys lie in a warp's lanes, the next in the same lanes' other registers.
    place = tl.arange(0, KEYS)
    place = place % 8 + place // (8 * WARPS) * 8 + place // 8 % WARPS * (KEYS // WARPS)
    WHOLE: tl.constexpr = blocks is None and PER_PAGE % KEYS == 0  # a tile lies in one page
    if begin < scored:
        last = scored - 1
        entry = _entries(listed, begin, place, num_columns, BLOCK_SIZE, WHOLE)
        page = _pages(table, entry, seen, KEYS, PER_PAGE, WHOLE)
        words, exponents, mine = _fetch(
            *(values, scales, value_stride, scale_stride),
            *(page, entry, place, seen, DIM, PER_PAGE, WHOLE),
        )
        tile = tl.minimum(begin + 1, last)
        entry = _entries(listed, tile, place, num_columns, BLOCK_SIZE, WHOLE)
        page = _pages(table, entry, seen, KEYS, PER_PAGE, WHOLE)
        tile = tl.minimum(begin + 2, last)
        later = _entries(listed, tile, place, num_columns, BLOCK_SIZE, WHOLE)
        for tile in tl.range(begin, scored, num_stages=1):
            key, power = key_operand(words, exponents, DIM, FP8)
            next_words, next_exponents, next_mine = _fetch(
                *(values, scales, value_stride, scale_stride),
                *(page, entry, place, seen, DIM, PER_PAGE, WHOLE),
            )
            entry, page = later, _pages(table, later, seen, KEYS, PER_PAGE, WHOLE)
            after = tl.minimum(tile + 3, last)
            later = _entries(listed, after, place, num_columns, BLOCK_SIZE, WHOLE)
            # The tensor cores' rows: eight lanes, a register, warps, other registers.
            key = key.reshape(KEYS // (16 * WARPS), 2, WARPS, 8, DIM).permute(0, 2, 1, 3, 4)
            ordered = power.reshape(KEYS // (16 * WARPS), 2, WARPS, 8).permute(0, 2, 1, 3)
            score = sum_heads(
                *(key.reshape(KEYS, DIM), ordered.reshape(KEYS), x, weight),
                *(1, BLOCK_HEADS, EXACT, FP8),
            )
            score = score.reshape(KEYS // (16 * WARPS), WARPS, 2, 8).permute(0, 2, 1, 3)
            score = tl.where(mine < seen, score.reshape(KEYS), -float("inf"))
            column = tile * KEYS + place
            _store(line, column, cast(score, scores.dtype.element_ty), column < num_columns)
            words, exponents, mine = next_words, next_exponents, next_mine
    for tile in tl.range(scored, end):
        column = tile * KEYS + tl.arange(0, KEYS)
        tl.store(line + column, -float("inf"), mask=column < num_columns)


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
def _pages(table, entry, seen, KEYS: tl.constexpr, PER_PAGE: tl.constexpr, WHOLE: tl.constexpr):
    """Pages of entries; of absent ones, of an entry that exists."""
    if WHOLE:
        return tl.load(table + entry // (PER_PAGE // KEYS)).to(tl.int64)
    else:  # noqa: RET505
        entry = tl.maximum(tl.minimum(entry, seen - 1), 0)
        return _look_up(table + entry // PER_PAGE).to(tl.int64)


@triton.jit
def _look_up(pointers):
    """Small int64 numbers, by the threads that need them; ``tl.load`` would go another way."""
    if NATIVE_CASTS:
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
    seen,
    DIM: tl.constexpr,
    PER_PAGE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Words and exponents of the keys of a tile, and their entries, large where absent."""
    KEYS: tl.constexpr = place.shape[0]
    if WHOLE:
        mine = entry * KEYS + place
        start = entry % (PER_PAGE // KEYS) * KEYS
        inner = place
    else:
        start = 0
        inner = tl.maximum(tl.minimum(entry, seen - 1), 0) % PER_PAGE
        mine = tl.where(entry < 0, 0x7FFFFFFF, entry)
    # No more than a byte at a time, or a thread would load the exponents of another's words.
    part = tl.multiple_of(tl.arange(0, DIM // 32), 1)
    words = values + page * value_stride + start * (DIM // 8) + inner * (DIM // 8)
    exponents = scales + page * scale_stride + start * (DIM // 32) + inner * (DIM // 32)
    words = tl.load(words[:, None] + tl.arange(0, DIM // 8)[None, :])
    return words, tl.load(exponents[:, None] + part[None, :]), mine


@triton.jit
def _store(line, column, score, mask):
    """``tl.store``, which would bring scores into another order through shared memory."""
    if NATIVE_CASTS and score.dtype == tl.bfloat16:
        at = (line + column).to(tl.int64)
        tl.inline_asm_elementwise(
            """{
                .reg .pred stored;
                setp.ne.b32 stored, $3, 0;
                @stored st.global.b16 [$1], $2;
                mov.b32 $0, 0;
            }""",
            "=r,l,h,r",
            [at, score, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(line + column, score, mask=mask)
