"""Attention over window rows and selected entries, in one launch from queries to outputs.

A program reads the index lists, translates pages, expands records and keeps one running softmax for
all heads of a row. Where rows are few, several programs share a row's keys and a second launch
merges what they found, in a fixed order. This is the kernel for every GPU; Hopper has one of its
own, ``attention_hopper``, for packed rows of 512 channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels import batch_invariance
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import attention as reference
from leadline.kernels.triton import attention_ends, attention_hopper, unpack
from leadline.kernels.triton.attention_merge import angles, finish, log_sum, merge, rotate
from leadline.kernels.triton.formats import dot_bf16, to_bf16
from leadline.kernels.triton.launch import bucket, is_hopper, tuned
from leadline.kernels.triton.quant import store_fp8_32

_PROGRAMS = {16: 264, 64: 132}  # that run at once on an H200, by their heads
_PART = 32  # slots: the least that a program of its own attends to
_MOST_SPLITS = 32  # what a program that merges has in registers
_LOG2_E = tl.constexpr(1.4426950408889634)
_UNIT = unpack.UNIT


def sparse_attention(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: RecordField,
    window_index: Tensor,
    window_width: Tensor,
    kv: RecordField | None,
    page_table: Tensor,
    req_of_row: Tensor,
    selected: Tensor | None,
    sink: Tensor,
    *,
    exact_rounding: bool,
    visible: Tensor | None = None,
    lse: Tensor | None = None,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """A program for up to 64 heads of a row; few rows are split over their keys and merged.

    ``exact_rounding``, and with it ``window_width``, change nothing: probabilities are rounded
    against the running maximum of this kernel's blocks. Rows of another width than a power of two
    take the reference.
    """
    rows, heads, width = q.shape
    if not all(unpack.expands(field, width) for field in (window, kv) if field is not None):
        return reference.sparse_attention(
            *(q, cos, sin, window, window_index, window_width, kv, page_table, req_of_row),
            *(selected, sink),
            exact_rounding=exact_rounding,
            visible=visible,
            lse=lse,
            fp8=fp8,
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    hopper = _suits_hopper(q, cos, window, kv)
    word = torch.int32 if hopper else None
    window_values, window_scales = unpack.words(window, word)
    kv_values, kv_scales, record, per_page = window_values, window_scales, "none", 1
    chosen = window_index[:, :0] if selected is None else selected
    entries = chosen.shape[1]
    if kv is not None:
        kv_values, kv_scales = unpack.words(kv, word)
        record, per_page = str(kv.record), kv_values.shape[1]
        if visible is not None:
            chosen, entries = visible.unsqueeze(1), page_table.shape[1] * per_page
    block_heads = 64 if hopper or heads > 16 else 16
    programs = _PROGRAMS[block_heads]
    head_blocks = triton.cdiv(heads, block_heads)
    parts = triton.cdiv(window_index.shape[1], _PART) + triton.cdiv(entries, _PART)
    most_splits = min(max(programs // (rows * head_blocks), 1), _MOST_SPLITS)
    if batch_invariance.switch.enabled:  # parts are as many as the longest row has
        most_splits = 1
    parts_per_split = triton.cdiv(parts, most_splits)
    if hopper:  # which takes two at a time
        parts_per_split += parts_per_split % 2
    splits = triton.cdiv(parts, parts_per_split)
    codes, exponents = fp8 or (None, None)
    partial, tops, totals = out, sink, sink
    if splits > 1:
        partial = torch.empty(rows, splits, heads, width, dtype=torch.float32, device=q.device)
        tops, totals = torch.empty(2, rows, splits, heads, dtype=torch.float32, device=q.device)
    grid = (min(rows, programs), splits, head_blocks)
    arguments = (
        q,
        cos,
        sin,
        window_values,
        window_scales,
        window_index,
        kv_values,
        kv_scales,
        page_table,
        req_of_row,
        chosen,
        sink,
        out,
        partial,
        tops,
        totals,
        lse,
        codes,
        exponents,
        rows,
        heads,
        q.stride(0),
        q.stride(1),
        window_index.shape[1],
        window_index.stride(0),
        page_table.stride(0),
        entries,
        chosen.stride(0),
        parts_per_split,
        str(window.record),
        window_values.shape[1],
        *window_values.stride()[:2],
        *window_scales.stride()[:2],
        record,
        per_page,
        *kv_values.stride()[:2],
        *kv_scales.stride()[:2],
        splits > 1,
        kv is not None and visible is not None,
    )
    if hopper:
        attention_hopper.attend[grid](*arguments, num_warps=4)
    else:
        extra = bucket(batch_invariance.planned_rows(rows)), width, cos.shape[1], block_heads, _PART
        _ATTEND[block_heads][grid](*arguments, *extra)
    if splits > 1:
        merge[(rows, heads)](
            partial,
            tops,
            totals,
            cos,
            sin,
            sink,
            out,
            lse,
            codes,
            exponents,
            splits,
            width,
            cos.shape[1],
            triton.next_power_of_2(splits),
            num_warps=4,
        )
    return out


def _suits_hopper(q: Tensor, cos: Tensor, window: RecordField, kv: RecordField | None) -> bool:
    """Whether the kernel for Hopper takes these operands."""
    if not is_hopper():
        return False
    records = {window.record} if kv is None else {window.record, kv.record}
    return (
        q.dtype == torch.bfloat16
        and (q.shape[2], 2 * cos.shape[1])
        == (attention_ends.WIDTH.value, attention_ends.ROTATED.value)
        and records <= {Record.FP4_16, Record.FP8_32, Record.FP8_64}
    )


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_heads",
        "num_window",
        "window_row",
        "table_row",
        "num_selected",
        "selected_row",
        "parts_per_split",
        "rows_bucket",
    ]
)
def _attend(
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
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    RING_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    RING_SCALES: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    ENTRIES: tl.constexpr,
    PER_PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    ENTRY_STRIDE: tl.constexpr,
    PAGE_SCALES: tl.constexpr,
    ENTRY_SCALES: tl.constexpr,
    SPLIT: tl.constexpr,
    ALL: tl.constexpr,
    rows_bucket,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One split of a row: some slots of its window, rounded up to parts, and selected entries.

    With ``ALL``, ``selected`` has the number of entries that a row attends to, the first ones.
    """
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    is_head = head < num_heads
    channel = tl.arange(0, WIDTH)
    # Two blocks are loaded ahead. A load that another load leads to takes as many stages again;
    # rows of plain records, and of those with channels in bf16, are so large that only one fits.
    small: tl.constexpr = ENTRIES == "fp8_32" or ENTRIES == "fp4_16"
    window_stages: tl.constexpr = 5 if WINDOW == "fp8_32" else 3
    entry_stages: tl.constexpr = (5 if small else 3) if ALL else (8 if small else 5)
    behind_window = tl.cdiv(num_window, PART) * PART
    begin = split * parts_per_split * PART
    end = begin + parts_per_split * PART
    window_end = tl.minimum(end, num_window)
    entry_begin = tl.maximum(begin - behind_window, 0)
    entry_end = tl.minimum(end - behind_window, num_selected)

    row = tl.program_id(0).to(tl.int64)
    query = _query(q, cos, sin, row, head, is_head, q_row, q_head, WIDTH, PAIRS)
    # Carried from row to row although most programs have one row: Triton keeps an operand in shared
    # memory if a loop hands it over, and takes one that was just computed through registers.
    for row_number in tl.range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(row_number, tl.int64)
        top = tl.full([HEADS], -1e30, tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        sums = tl.zeros([HEADS, WIDTH], tl.float32)
        indices = window_index + row * window_row
        chosen, table = selected, page_table
        if ENTRIES != "none":
            chosen += row * selected_row
            request = tl.load(req_of_row + row).to(tl.int64)
            table += request * table_row
        if ALL:
            seen = tl.load(chosen, mask=request >= 0, other=0).to(tl.int32)
            parts = tl.cdiv(behind_window + seen, PART)
            begin = split * tl.cdiv(parts, num_splits) * PART
            end = begin + tl.cdiv(parts, num_splits) * PART
            window_end = tl.minimum(end, num_window)
            entry_begin = tl.maximum(begin - behind_window, 0)
            entry_end = tl.minimum(end - behind_window, seen)
        for start in tl.range(begin, window_end, BLOCK, num_stages=window_stages):
            slot = start + tl.arange(0, BLOCK)
            index = tl.load(indices + slot, mask=slot < window_end, other=-1)
            valid = index >= 0
            keys = unpack.load_rows(
                window_values + _row_offset(index, RING, RING_STRIDE, ROW_STRIDE),
                window_scales + _row_offset(index, RING, RING_SCALES, ROW_SCALES),
                valid,
                WINDOW,
                WIDTH,
            )
            top, total, sums = _attend_block(
                query, keys, valid, start < window_end, top, total, sums
            )
        if ENTRIES != "none":
            for start in tl.range(entry_begin, entry_end, BLOCK, num_stages=entry_stages):
                slot = start + tl.arange(0, BLOCK)
                if ALL:
                    entry, valid = slot, slot < entry_end
                else:
                    entry = tl.load(chosen + slot, mask=slot < entry_end, other=-1)
                    valid = entry >= 0
                    entry = tl.maximum(entry, 0).to(tl.int32)
                page = tl.load(table + entry // PER_PAGE, mask=valid, other=0)
                place = entry % PER_PAGE
                keys = unpack.load_rows(
                    entry_values + (page * PAGE_STRIDE + place * ENTRY_STRIDE),
                    entry_scales + (page * PAGE_SCALES + place * ENTRY_SCALES),
                    valid,
                    ENTRIES,
                    WIDTH,
                )
                top, total, sums = _attend_block(
                    query, keys, valid, start < entry_end, top, total, sums
                )
        if SPLIT:
            at = (row * num_splits + split) * num_heads + head
            tl.store(tops + at, top, mask=is_head)
            tl.store(totals + at, total, mask=is_head)
            at = partial + at[:, None] * WIDTH + channel
            tl.store(at, sums, mask=is_head[:, None])
        else:
            bias = tl.load(sink + head, mask=is_head, other=0.0)
            result = finish(sums, top, total, bias, cos, sin, row, WIDTH, PAIRS)
            at = out + (row * num_heads + head[:, None]) * WIDTH + channel
            tl.store(at, result, mask=is_head[:, None])
            if codes is not None:
                inside = tl.broadcast_to(is_head[:, None], (HEADS, WIDTH // 32))
                first = (row * num_heads + head) * WIDTH
                store_fp8_32(result, codes, exponents, first, inside)
            if lse is not None:
                tl.store(lse + row * num_heads + head, log_sum(top, total), mask=is_head)
        query = tl.zeros([HEADS, WIDTH], tl.bfloat16)
        following = row + tl.num_programs(0)
        if following < num_rows:
            query = _query(q, cos, sin, following, head, is_head, q_row, q_head, WIDTH, PAIRS)


@triton.jit
def _row_offset(index, RING: tl.constexpr, RING_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr):
    """Where window rows with these addresses begin: not evenly, where scales lie behind a ring."""
    if RING_STRIDE == RING * ROW_STRIDE:
        return index * ROW_STRIDE
    return index // RING * RING_STRIDE + index % RING * ROW_STRIDE


@triton.jit
def _query(
    q, cos, sin, row, head, is_head, q_row, q_head, WIDTH: tl.constexpr, PAIRS: tl.constexpr
):
    """Rotated queries ``[heads, WIDTH]`` of a row, bf16."""
    at = q + row * q_row + head[:, None] * q_head + tl.arange(0, WIDTH)
    query = tl.load(at, mask=is_head[:, None], other=0.0).to(tl.float32)
    turn_cos, turn_sin = angles(cos, sin, row, WIDTH, PAIRS)
    return to_bf16(rotate(query, turn_cos, turn_sin))


@triton.jit
def _attend_block(query, keys, valid, always, top, total, sums):
    """A block of keys into the running maximum, denominator and weighted sums."""
    HEADS: tl.constexpr = query.shape[0]
    BLOCK: tl.constexpr = keys.shape[0]
    factor: tl.constexpr = _LOG2_E / (query.shape[1] ** 0.5 * _UNIT)
    scores = dot_bf16(query, tl.trans(keys), tl.zeros([HEADS, BLOCK], tl.float32))
    scores = tl.where(valid[None, :], scores * factor, -float("inf"))
    highest, shrink = top, top
    weights = tl.zeros([HEADS, BLOCK], tl.bfloat16)
    # The branch hides the second product from the first. Where it sees a chain, Triton gives a
    # warpgroup all keys of 64 heads, for registers' sake, and two of them compute the same.
    if always:
        highest = tl.maximum(top, tl.max(scores, axis=1))
        exact = tl.exp2(scores - highest[:, None])
        shrink = tl.exp2(top - highest)
        total = total * shrink + tl.sum(exact, axis=1)
        weights = to_bf16(exact)
    return highest, total, dot_bf16(weights, keys, sums * shrink[:, None])


_KEY = ("rows_bucket", "WINDOW", "ENTRIES", "WIDTH", "SPLIT", "ALL")
# By heads. Four warps have no registers for 64 expanded rows.
_ATTEND = {
    16: tuned([triton.Config({"BLOCK": 32}, num_warps=4)], _KEY, variant="16 heads")(_attend),
    64: tuned(
        [triton.Config({"BLOCK": block}, num_warps=8) for block in (32, 64)],
        _KEY,
        variant="64 heads",
    )(_attend),
}
