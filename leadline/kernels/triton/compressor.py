"""Compressed entries and index keys: one launch each (kernels.md 3.1)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels import unfused
from leadline.kernels.batch_invariance import planned_rows
from leadline.kernels.packed import RecordField
from leadline.kernels.triton.formats import dot_bf16, to_bf16
from leadline.kernels.triton.hadamard import hadamard
from leadline.kernels.triton.launch import await_previous, overlapped
from leadline.kernels.triton.pack import (
    block_width,
    field_arguments,
    load_angles,
    packs,
    rotate_pairs,
    store_blocks,
)
from leadline.kernels.triton.pooling import pool, refresh_ring

_FEW_ROWS = 1024  # below, a program's latency counts; above, how many run at a time
_COPIED = 1024  # values that a warp copies at a time


def store_entries(
    projected: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    pos: Tensor,
    req_of_row: Tensor,
    q_off: Tensor,
    slot: Tensor,
    seq_len: Tensor,
    write_from: Tensor,
    page_table: Tensor,
    entries: RecordField,
    open_groups: Tensor | None,
    *,
    ratio: int,
    eps: float,
    dtype: torch.dtype,
    ape: Tensor | None = None,
    overlaps: bool = False,
    hadamard: bool = False,
) -> Tensor:
    """A program for every ``ratio`` packed rows, and one for every request with a ring.

    The first kind stores the entry whose rows are all of this step: of so many rows, one at most
    ends such a group. The second stores those that an earlier step began, and refreshes the ring
    when it has read it: nothing else touches it. Entries that ``pack`` has no tiles for take
    separate steps.
    """
    rows, width = len(pos), norm.shape[0]
    if not packs(entries, width):
        return unfused.store_entries(
            *(projected, norm, cos, sin, pos, req_of_row, q_off, slot, seq_len, write_from),
            *(page_table, entries, open_groups),
            ratio=ratio,
            eps=eps,
            dtype=dtype,
            ape=ape,
            overlaps=overlaps,
            hadamard=hadamard,
        )
    latent = torch.empty(rows, width, dtype=dtype, device=projected.device)
    if not rows:
        return latent
    requests = 0 if open_groups is None else len(slot)
    # Two rows of an entry are so little that one warp holds them.
    num_warps = 1 if planned_rows(rows) >= _FEW_ROWS and ratio <= 2 and not overlaps else 4
    _store_entries[(triton.cdiv(rows, ratio) + requests,)](
        projected,
        projected.stride(0),
        ape,
        norm,
        cos,
        sin,
        pos,
        req_of_row,
        q_off,
        slot,
        seq_len,
        write_from,
        page_table,
        page_table.stride(0),
        *field_arguments(entries),
        projected if open_groups is None else open_groups,
        latent,
        rows,
        eps,
        RATIO=ratio,
        HALVES=1 + overlaps,
        RING=0 if open_groups is None else open_groups.shape[1],
        ENTRIES=entries.values.shape[1],
        WIDTH=width,
        HALF=cos.shape[1],
        HADAMARD=hadamard,
        BLOCK=block_width(entries.record),
        RECORD=entries.record.value,
        COPIED=max(1, _COPIED * num_warps // projected.shape[1]),
        num_warps=num_warps,
        # A fused multiply-add rounds otherwise than the definition: another code at a tie.
        enable_fp_fusion=False,
        **overlapped(),
    )
    return latent


@triton.jit
def _store_entries(
    projected,
    row_stride,
    ape,
    norm,
    cos,
    sin,
    pos,
    req_of_row,
    q_off,
    slot,
    seq_len,
    write_from,
    page_table,
    table_stride,
    values,
    scales,
    value_page,
    value_entry,
    scale_page,
    scale_entry,
    ring,
    latent,
    rows,
    eps,
    RATIO: tl.constexpr,
    HALVES: tl.constexpr,
    RING: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HADAMARD: tl.constexpr,
    BLOCK: tl.constexpr,
    RECORD: tl.constexpr,
    COPIED: tl.constexpr,
):
    """Programs of rows come first, those of requests behind them."""
    await_previous()
    span: tl.constexpr = RATIO * HALVES  # rows of an entry
    program = tl.program_id(0)
    row_programs = tl.cdiv(rows, RATIO)
    request = tl.cast(program - row_programs, tl.int64)
    # The first row that closes a group, and where rows end; -1 stands for no row.
    row, end, position, begin = -1, -1, tl.zeros((), tl.int64), 0
    ring_of_slot = ring
    if program < row_programs:
        turn = tl.arange(0, triton.next_power_of_2(RATIO))
        some = program * RATIO + turn
        inside = (turn < RATIO) & (some < rows)
        positions = tl.load(pos + some, mask=inside, other=0)
        requests = tl.load(req_of_row + some, mask=inside, other=-1)
        known = requests >= 0
        firsts = tl.load(q_off + requests, mask=known, other=0)
        closes = known & ((positions + 1) % RATIO == 0)
        closes &= positions >= tl.load(write_from + requests, mask=known, other=0)
        row = tl.max(tl.where(closes & (some - span + 1 >= firsts), some, -1))
        if row >= 0:
            end = row + 1
            position = tl.load(pos + row)
            request = tl.load(req_of_row + row).to(tl.int64)
            begin = tl.load(q_off + request).to(tl.int32)
    else:
        begin = tl.load(q_off + request).to(tl.int32)
        behind = tl.load(q_off + request + 1).to(tl.int32)
        if begin < behind:
            position = tl.load(pos + begin)
            until = RATIO - 1 - (position % RATIO).to(tl.int32)
            row, position = begin + until, position + until
            end = tl.minimum(behind, begin + span - 1)
            lowest = tl.load(write_from + request)
            while (row < end) & (position < lowest):
                row += RATIO
                position += RATIO
        if RING > 0:
            ring_of_slot += tl.load(slot + request).to(tl.int64) * (RING * 2 * HALVES * WIDTH)
    while row < end:
        page_size: tl.constexpr = ENTRIES * RATIO
        page = tl.load(page_table + request * table_stride + position // page_size).to(tl.int64)
        entry = position % page_size // RATIO
        _store_entry(
            projected,
            row_stride,
            ape,
            ring_of_slot,
            tl.cast(row, tl.int64),
            position,
            begin,
            norm,
            cos,
            sin,
            latent,
            values + page * value_page + entry * value_entry,
            scales + page * scale_page + entry * scale_entry,
            eps,
            RATIO,
            HALVES,
            RING,
            WIDTH,
            HALF,
            HADAMARD,
            BLOCK,
            RECORD,
        )
        row += RATIO
        position += RATIO
    if (RING > 0) & (program >= row_programs):
        tl.debug_barrier()  # every thread has read its part of the ring
        kept: tl.constexpr = 2 * HALVES * WIDTH
        refresh_ring(
            *(projected, row_stride, ring_of_slot, q_off, seq_len, request, RING, kept, COPIED)
        )


@triton.jit
def _store_entry(
    projected,
    row_stride,
    ape,
    ring,
    row,
    position,
    begin,
    norm,
    cos,
    sin,
    latent,
    values,
    scales,
    eps,
    RATIO: tl.constexpr,
    HALVES: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HADAMARD: tl.constexpr,
    BLOCK: tl.constexpr,
    RECORD: tl.constexpr,
):
    """The group that ends with ``row``: its rows before ``begin`` are in the ring."""
    block = tl.arange(0, WIDTH // BLOCK)
    channel = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    scale = tl.load(norm + channel).to(tl.float32)
    angles = block * 0 + row * HALF
    rotates, c, s = load_angles(block * BLOCK, cos + angles, sin + angles, BLOCK // 2, WIDTH, HALF)
    if RING == 0:
        pooled = tl.load(projected + row * row_stride + channel).to(tl.float32)
    else:
        pooled = pool(
            *(projected, row_stride, ape, ring, row, position, begin, channel),
            *(RATIO, HALVES, RING, WIDTH),
        )

    pooled = to_bf16(pooled).to(tl.float32)
    factor = tl.rsqrt(tl.sum(pooled * pooled) / WIDTH + eps)
    normed = to_bf16(scale * (pooled * factor))
    tl.store(latent + row * WIDTH + channel, normed)
    made = rotate_pairs(normed.to(tl.float32), rotates, c, s)
    if HADAMARD:
        made = to_bf16(hadamard(made.reshape(1, WIDTH))).to(tl.float32)
        made = made.reshape(WIDTH // BLOCK, BLOCK)
    values, scales = values + block * 0, scales + block * 0
    store_blocks(made, values, scales, block, block >= 0, RECORD, WIDTH - 2 * HALF)


def store_index_keys(
    latent: Tensor,
    weight: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    pos: Tensor,
    req_of_row: Tensor,
    write_from: Tensor,
    page_table: Tensor,
    keys: RecordField,
    *,
    ratio: int,
    eps: float,
) -> None:
    """The product and all that follows it in one program of some packed rows."""
    rows, width = latent.shape
    if not rows:
        return
    # Few rows: all of the weight is under way at once. Many: fewer programs read it.
    few = planned_rows(rows) < _FEW_ROWS
    block_rows, num_warps, num_stages = (16, 4, 4) if few else (64, 8, 3)
    _store_index_keys[(triton.cdiv(rows, block_rows),)](
        latent,
        weight,
        norm,
        cos,
        sin,
        pos,
        req_of_row,
        write_from,
        page_table,
        page_table.stride(0),
        *field_arguments(keys),
        rows,
        eps,
        RATIO=ratio,
        ENTRIES=keys.values.shape[1],
        WIDTH=width,
        KEY=weight.shape[0],
        HALF=cos.shape[1],
        BLOCK=block_width(keys.record),
        RECORD=keys.record.value,
        BLOCK_ROWS=block_rows,
        BLOCK_K=min(width, 128),
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=False,
        **overlapped(),
    )


@triton.jit
def _store_index_keys(
    latent,
    weight,
    norm,
    cos,
    sin,
    pos,
    req_of_row,
    write_from,
    page_table,
    table_stride,
    values,
    scales,
    value_page,
    value_entry,
    scale_page,
    scale_entry,
    rows,
    eps,
    RATIO: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    KEY: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows that close no group are multiplied as zeros and not stored."""
    await_previous()
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < rows
    position = tl.load(pos + row, mask=inside, other=0)
    request = tl.load(req_of_row + row, mask=inside, other=-1)
    known = request >= 0
    closes = known & ((position + 1) % RATIO == 0)
    closes &= position >= tl.load(write_from + request, mask=known, other=0)
    page_size: tl.constexpr = ENTRIES * RATIO
    page_at = page_table + request * table_stride + position // page_size
    page = tl.load(page_at, mask=closes, other=0).to(tl.int64)
    entry = position % page_size // RATIO
    row = row.to(tl.int64)

    channel = tl.arange(0, KEY)
    scale = tl.load(norm + channel).to(tl.float32)
    # Every block of a key is a row of a tile, with the addresses of its own key.
    blocks: tl.constexpr = KEY // BLOCK
    block = tl.arange(0, BLOCK_ROWS * blocks) % blocks
    angles = _for_blocks(tl.minimum(row, rows - 1) * HALF, blocks)
    rotates, c, s = load_angles(block * BLOCK, cos + angles, sin + angles, BLOCK // 2, KEY, HALF)
    product = tl.zeros([BLOCK_ROWS, KEY], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(latent + row[:, None] * WIDTH + k[None, :], mask=closes[:, None], other=0.0)
        w = tl.load(weight + channel[None, :] * WIDTH + k[:, None])
        product = dot_bf16(x, w, product)

    key = to_bf16(product).to(tl.float32)
    factor = tl.rsqrt(tl.sum(key * key, axis=1) / KEY + eps)
    key = to_bf16(scale[None, :] * (key * factor[:, None])).to(tl.float32)
    tile = tl.reshape(key, [BLOCK_ROWS * blocks, BLOCK])
    rotated = rotate_pairs(tile, rotates, c, s)
    store_blocks(
        rotated,
        _for_blocks(values + page * value_page + entry * value_entry, blocks),
        _for_blocks(scales + page * scale_page + entry * scale_entry, blocks),
        block,
        _for_blocks(closes, blocks),
        RECORD,
        KEY - 2 * HALF,
    )


@triton.jit
def _for_blocks(x, BLOCKS: tl.constexpr):
    """``[rows]`` -> ``[rows BLOCKS]``: each value once for every block of its row."""
    ROWS: tl.constexpr = x.shape[0]
    return tl.reshape(tl.broadcast_to(x[:, None], [ROWS, BLOCKS]), [ROWS * BLOCKS])
