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
from leadline.kernels.triton.launch import await_previous, overlapped
from leadline.kernels.triton.pack import (
    block_width,
    field_arguments,
    load_angles,
    rotate_pairs,
    store_blocks,
)

_FEW_ROWS = 1024  # below, a program's latency counts; above, how many run at a time


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

    The first kind stores groups whose rows are all of this step. The second closes the group that
    an earlier step began, and refreshes the ring when it has read it: nothing else touches it.
    """
    if ape is not None:
        return unfused.store_entries(
            *(projected, norm, cos, sin, pos, req_of_row, q_off, slot, seq_len),
            *(write_from, page_table, entries, open_groups),
            ratio=ratio,
            eps=eps,
            dtype=dtype,
            ape=ape,
            overlaps=overlaps,
            hadamard=hadamard,
        )
    rows, width = len(pos), norm.shape[0]
    latent = torch.empty(rows, width, dtype=dtype, device=projected.device)
    if not rows:
        return latent
    requests = 0 if open_groups is None else len(slot)
    _store_entries[(triton.cdiv(rows, ratio) + requests,)](
        projected,
        projected.stride(0),
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
        RING=0 if open_groups is None else open_groups.shape[1],
        ENTRIES=entries.values.shape[1],
        WIDTH=width,
        HALF=cos.shape[1],
        BLOCK=block_width(entries.record),
        RECORD=entries.record.value,
        num_warps=4 if planned_rows(rows) < _FEW_ROWS else 1,
        # A fused multiply-add rounds otherwise than the definition: another code at a tie.
        enable_fp_fusion=False,
        **overlapped(),
    )
    return latent


@triton.jit
def _store_entries(
    projected,
    row_stride,
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
    RING: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Programs of rows come first, those of requests behind them."""
    await_previous()
    program = tl.program_id(0)
    row_programs = tl.cdiv(rows, RATIO)
    group = program - row_programs
    row, end = program * RATIO, tl.minimum(program * RATIO + RATIO, rows)
    if group >= 0:
        row = tl.load(q_off + group).to(tl.int32)
        # The open group closes with one of the first RATIO - 1 rows, or not in this step.
        end = tl.minimum(tl.load(q_off + group + 1).to(tl.int32), row + RATIO - 1)
    while row < end:
        position = tl.load(pos + row)
        request = group.to(tl.int64)
        if group < 0:
            request = tl.load(req_of_row + row).to(tl.int64)
        # All of these are under way together, whatever the position will be.
        known = request >= 0
        begin = tl.load(q_off + request, mask=known, other=0)
        written_from = tl.load(write_from + request, mask=known, other=0)
        ring_of_slot = ring
        if RING > 0:
            slot_of_row = tl.load(slot + request, mask=known, other=0).to(tl.int64)
            ring_of_slot += slot_of_row * (RING * 2 * WIDTH)
        if known & ((position + 1) % RATIO == 0):
            page_size: tl.constexpr = ENTRIES * RATIO
            page = tl.load(page_table + request * table_stride + position // page_size)
            page = page.to(tl.int64)
            entry = position % page_size // RATIO
            begins_earlier = row - RATIO + 1 < begin
            if (begins_earlier == (group >= 0)) & (position >= written_from):
                _store_entry(
                    projected,
                    row_stride,
                    ring_of_slot,
                    row.to(tl.int64),
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
                    RING,
                    WIDTH,
                    HALF,
                    BLOCK,
                    RECORD,
                )
        row += 1
    if (RING > 0) & (group >= 0):
        tl.debug_barrier()  # every thread has read its part of the ring
        _refresh_ring(projected, row_stride, ring, q_off, slot, seq_len, group, RING, 2 * WIDTH)


@triton.jit
def _store_entry(
    projected,
    row_stride,
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
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
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
        largest = tl.full(channel.shape, float("-inf"), tl.float32)
        total = tl.zeros(channel.shape, tl.float32)
        pooled = tl.zeros(channel.shape, tl.float32)
        for back in tl.static_range(RATIO):
            source = projected + (row - back) * row_stride
            if row - back < begin:
                source = ring + (position - back) % RING * (2 * WIDTH)
            gate = tl.load(source + WIDTH + channel)
            value = tl.load(source + channel)
            above = tl.maximum(largest, gate)
            shrink, weight = tl.exp(largest - above), tl.exp(gate - above)
            total = total * shrink + weight
            pooled = pooled * shrink + weight * value
            largest = above
        pooled /= total

    pooled = to_bf16(pooled).to(tl.float32)
    factor = tl.rsqrt(tl.sum(pooled * pooled) / WIDTH + eps)
    normed = to_bf16(scale * (pooled * factor))
    tl.store(latent + row * WIDTH + channel, normed)
    rotated = rotate_pairs(normed.to(tl.float32), rotates, c, s)
    store_blocks(rotated, values + block * 0, scales + block * 0, block, block >= 0, RECORD)


@triton.jit
def _refresh_ring(
    projected,
    row_stride,
    ring,
    q_off,
    slot,
    seq_len,
    group,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Keep the newest rows of a request, each at its position modulo the ring."""
    end = tl.load(q_off + group + 1)
    row = tl.maximum(tl.load(q_off + group), end - RING)
    length = tl.load(seq_len + group)
    kept = ring + tl.load(slot + group).to(tl.int64) * (RING * WIDTH)
    channel = tl.arange(0, WIDTH)
    while row < end:
        value = tl.load(projected + row * row_stride + channel)
        tl.store(kept + (length - (end - row)) % RING * WIDTH + channel, value)
        row += 1


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
    )


@triton.jit
def _for_blocks(x, BLOCKS: tl.constexpr):
    """``[rows]`` -> ``[rows BLOCKS]``: each value once for every block of its row."""
    ROWS: tl.constexpr = x.shape[0]
    return tl.reshape(tl.broadcast_to(x[:, None], [ROWS, BLOCKS]), [ROWS * BLOCKS])
