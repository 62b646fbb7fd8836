"""The window: addresses of its rows, and all between a projection and them (kernels.md 4)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels import unfused
from leadline.kernels.batch_invariance import planned_rows
from leadline.kernels.packed import RecordField
from leadline.kernels.triton.formats import to_bf16
from leadline.kernels.triton.launch import await_previous, bucket, overlapped, tuned
from leadline.kernels.triton.norm import norm_rows, rms_norm
from leadline.kernels.triton.pack import (
    block_width,
    field_arguments,
    load_angles,
    packs,
    rotate_pairs,
    store_blocks,
)


def norm_rotate_store(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    field: RecordField,
    outer: Tensor,
    inner: Tensor,
    *,
    eps: float,
) -> None:
    """One program a row; rows that ``pack`` has no tiles for take the definition's steps."""
    if not packs(field, weight.shape[0]):
        unfused.norm_rotate_store(x, weight, cos, sin, field, outer, inner, eps=eps)
        return
    _launch(x, weight, cos, sin, field, outer, inner, eps=eps)


def norm_query_store_window(
    down: Tensor,
    query_weight: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: RecordField,
    outer: Tensor,
    inner: Tensor,
    *,
    eps: float,
) -> Tensor:
    """Two programs a row, where one stores its record."""
    if not packs(window, weight.shape[0]):
        rank = query_weight.shape[0]
        norm_rotate_store(down[:, rank:], weight, cos, sin, window, outer, inner, eps=eps)
        return rms_norm(down[:, :rank], query_weight, eps=eps)
    query = down.new_empty(down.shape[0], query_weight.shape[0])
    _launch(down, weight, cos, sin, window, outer, inner, query_weight, query, eps=eps)
    return query


def _launch(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    field: RecordField,
    outer: Tensor,
    inner: Tensor,
    query_weight: Tensor | None = None,
    query: Tensor | None = None,
    *,
    eps: float,
) -> None:
    """With a query, ``x`` begins with it."""
    rows, width = x.shape[0], weight.shape[0]
    rank = 0 if query is None else query.shape[1]
    if rows:
        _norm_rotate_store[(rows, 1 if query is None else 2)](
            x,
            weight,
            cos,
            sin,
            *field_arguments(field),
            outer,
            inner,
            query_weight,
            query,
            x.stride(0),
            eps,
            bucket(planned_rows(rows)),
            WIDTH=width,
            HALF=cos.shape[1],
            BLOCK=block_width(field.record),
            RECORD=field.record.value,
            RANK=rank,
            RANK_BLOCK=triton.next_power_of_2(rank),
            # A fused multiply-add rounds otherwise than the definition: another code at a tie.
            enable_fp_fusion=False,
            **overlapped(),
        )


@tuned(
    [triton.Config({}, num_warps=warps) for warps in (4, 2, 1)],
    key=["rows_bucket", "WIDTH", "RANK", "RECORD"],
)
@triton.jit(do_not_specialize=["rows_bucket"])
def _norm_rotate_store(
    x,
    weight,
    cos,
    sin,
    values,
    scales,
    value_outer,
    value_inner,
    scale_outer,
    scale_inner,
    outer,
    inner,
    query_weight,
    query,
    row_stride,
    eps,
    rows_bucket,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    RECORD: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """The first program of a row stores its record, the second normalises its query."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    x += row * row_stride
    if query is not None:  # noqa: SIM102 - this one is decided before compiling
        if tl.program_id(1) == 1:
            one = tl.arange(0, 1)[:, None]
            to = query + row * RANK + one
            norm_rows(x + one, query_weight, to, one == 0, RANK, eps, RANK_BLOCK)
    if tl.program_id(1) == 0:
        place, entry = tl.load(outer + row).to(tl.int64), tl.load(inner + row).to(tl.int64)
        block = tl.arange(0, WIDTH // BLOCK)
        channel = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        value = tl.load(x + RANK + channel).to(tl.float32)
        gain = tl.load(weight + channel).to(tl.float32)
        angles = row * HALF + block * 0
        rotates, c, s = load_angles(
            block * BLOCK, cos + angles, sin + angles, BLOCK // 2, WIDTH, HALF
        )
        factor = tl.rsqrt(tl.sum(value * value) / WIDTH + eps)
        tile = rotate_pairs(to_bf16(value * factor * gain).to(tl.float32), rotates, c, s)
        at_values = values + (place * value_outer + entry * value_inner + block * 0)
        at_scales = scales + (place * scale_outer + entry * scale_inner + block * 0)
        stored = (block >= 0) & (place >= 0)
        store_blocks(tile, at_values, at_scales, block, stored, RECORD, WIDTH - 2 * HALF)


def plan_window(
    pos: Tensor,
    req_of_row: Tensor,
    q_off: Tensor,
    seq_len: Tensor,
    slot: Tensor,
    floor: Tensor,
    *,
    window: int,
    ring: int,
    staging: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One program a row."""
    rows = len(pos)
    index = torch.empty(rows, window, dtype=torch.int64, device=pos.device)
    width, outer, inner, seen = torch.empty(4, rows, dtype=torch.int64, device=pos.device)
    if rows:
        _plan[(rows,)](
            *(pos, req_of_row, q_off, seq_len, slot, floor, index, width, outer, inner, seen),
            staging,
            WINDOW=window,
            RING=ring,
            BLOCK=triton.next_power_of_2(window),
            num_warps=1,
        )
    return index, width, outer, inner, seen


@triton.jit(do_not_specialize=["staging"])
def _plan(
    pos,
    req_of_row,
    q_off,
    seq_len,
    slot,
    floor,
    index,
    width,
    outer,
    inner,
    seen,
    staging,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.load(req_of_row + row)
    live = group >= 0
    position = tl.load(pos + row)
    first = tl.load(q_off + group, mask=live, other=0)
    count = tl.load(q_off + group + 1, mask=live, other=0) - first
    length = tl.load(seq_len + group, mask=live, other=0)
    begin = length - count
    own_ring = tl.load(slot + group, mask=live, other=0) * RING
    oldest = tl.maximum(position - WINDOW + 1, tl.load(floor + group, mask=live, other=0))
    # Rows of this step from ``staged_from`` on are behind the rings.
    stays = count + WINDOW - 1 <= RING
    staged_from = tl.where(stays, position + 1, begin)
    to_staging = staging.to(tl.int64) * RING + first - begin
    place = tl.arange(0, BLOCK)
    read = oldest + place
    address = tl.where(read >= staged_from, to_staging + read, own_ring + read % RING)
    address = tl.where(live & (read <= position), address, -1)
    tl.store(index + row * WINDOW + place, address, mask=place < WINDOW)
    address = tl.where(position >= staged_from, to_staging + position, own_ring + position % RING)
    tl.store(width + row, tl.minimum(length, WINDOW))
    tl.store(outer + row, tl.where(live, address // RING, -1))
    tl.store(inner + row, tl.where(live, address % RING, 0))
    tl.store(seen + row, tl.where(live, position + 1, 0))


_COMMITTED = 16  # rows of a program


def commit_window(
    rings: RecordField,
    q_off: Tensor,
    seq_len: Tensor,
    slot: Tensor,
    *,
    window: int,
    staging: int,
) -> None:
    """Programs over the last rows of every group; those of a group that stays end at once."""
    ring = rings.values.shape[1]
    scales = rings.scales
    _commit[(len(slot), triton.cdiv(ring, _COMMITTED))](
        rings.values,
        scales,
        *rings.values.stride()[:2],
        *((0, 0) if scales is None else scales.stride()[:2]),
        *(q_off, seq_len, slot, staging),
        WINDOW=window,
        RING=ring,
        VALUES=rings.values.shape[2],
        SCALES=0 if scales is None else scales.shape[2],
        VALUE_BLOCK=triton.next_power_of_2(rings.values.shape[2]),
        SCALE_BLOCK=1 if scales is None else triton.next_power_of_2(scales.shape[2]),
        ROWS=_COMMITTED,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["staging"])
def _commit(
    values,
    scales,
    value_outer,
    value_inner,
    scale_outer,
    scale_inner,
    q_off,
    seq_len,
    slot,
    staging,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    VALUES: tl.constexpr,
    SCALES: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    group = tl.program_id(0)
    end = tl.load(q_off + group + 1)
    count = end - tl.load(q_off + group)
    if count + WINDOW - 1 <= RING:
        return
    back = RING - tl.program_id(1) * ROWS - tl.arange(0, ROWS)  # from the end of the group
    moves = (back > 0) & (back <= count)
    staged = end - back
    source, source_row = staging + staged // RING, staged % RING
    target = tl.load(slot + group).to(tl.int64)
    target_row = (tl.load(seq_len + group) - back) % RING
    _copy_rows(
        values + source * value_outer + source_row * value_inner,
        values + target * value_outer + target_row * value_inner,
        *(moves, VALUES, VALUE_BLOCK),
    )
    if SCALES > 0:
        _copy_rows(
            scales + source * scale_outer + source_row * scale_inner,
            scales + target * scale_outer + target_row * scale_inner,
            *(moves, SCALES, SCALE_BLOCK),
        )


@triton.jit
def _copy_rows(source, target, moves, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows at pointers ``[n]`` to others."""
    channel = tl.arange(0, BLOCK)[None, :]
    mask = moves[:, None] & (channel < WIDTH)
    tl.store(target[:, None] + channel, tl.load(source[:, None] + channel, mask=mask), mask=mask)
