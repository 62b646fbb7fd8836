"""What lies between the down-projection and the window: norms, rotation, records (kernels.md 4)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.packed import RecordField
from leadline.kernels.triton.formats import to_bf16
from leadline.kernels.triton.launch import await_previous, bucket, overlapped, tuned
from leadline.kernels.triton.norm import norm_row
from leadline.kernels.triton.pack import (
    block_width,
    field_arguments,
    load_angles,
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
    """One program a row, whose width is a power of two."""
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
    """Two programs a row; the window's width is a power of two."""
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
            bucket(rows),
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
            norm_row(x, query_weight, query + row * RANK, RANK, eps, RANK_BLOCK)
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
        values += place * value_outer + entry * value_inner
        scales += place * scale_outer + entry * scale_inner
        stored = (block >= 0) & (place >= 0)
        store_blocks(tile, values + block * 0, scales + block * 0, block, stored, RECORD)
