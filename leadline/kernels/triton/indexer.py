"""Index queries and scores over packed keys (kernels.md 5, 6)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels import debug
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import indexer as reference
from leadline.kernels.triton.formats import (
    absmax,
    cast,
    decode_ue8m0,
    fp4_32_scale,
    reciprocal_of_scale,
    round_e2m1,
    to_bf16,
)
from leadline.kernels.triton.index_scores import score_rows
from leadline.kernels.triton.launch import INTERPRETED, bucket, tuned

# Programs of a launch: four on each of 132 SMs. Longer inputs give each at most so many tiles, so
# that requests of different length share a GPU evenly.
_PROGRAMS = 528
_TILES = 32


def prepare_index_query(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One program a row."""
    return _prepared(q, cos, sin, rope_dim=2 * cos.shape[1])


def quantize_index_query(q: Tensor) -> Tensor:
    """The same kernel without a rotation."""
    return _prepared(q, q, q, rope_dim=0)


def _prepared(q: Tensor, cos: Tensor, sin: Tensor, *, rope_dim: int) -> Tensor:
    rows, heads, dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if rows:
        _prepare_query[(rows,)](
            *(q, cos, sin, out),
            *(q.stride(0), q.stride(1), cos.stride(0), heads),
            BLOCK_HEADS=triton.next_power_of_2(heads),
            DIM=dim,
            ROPE=rope_dim,
            num_warps=4,
            enable_fp_fusion=False,  # a last bit decides on which side of a tie a value falls
        )
    return out


@triton.jit
def _prepare_query(
    q,
    cos,
    sin,
    out,
    row_stride,
    head_stride,
    angle_stride,
    heads,
    BLOCK_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Rotate the last ROPE channels of a row's heads, and round to MXFP4."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    channel = tl.arange(0, DIM)[None, :]
    inside = head < heads
    x = tl.load(q + row * row_stride + head * head_stride + channel, mask=inside, other=0.0)
    x = x.to(tl.float32)
    if ROPE:
        pair = tl.arange(0, DIM // 2) - (DIM - ROPE) // 2
        c = tl.load(cos + row * angle_stride + pair, mask=pair >= 0, other=1.0)[None, :]
        s = tl.load(sin + row * angle_stride + pair, mask=pair >= 0, other=0.0)[None, :]
        first, second = x.reshape(BLOCK_HEADS, DIM // 2, 2).split()
        x = tl.join(first * c - second * s, second * c + first * s).reshape(BLOCK_HEADS, DIM)
        x = to_bf16(x).to(tl.float32)
    x = x.reshape(BLOCK_HEADS, DIM // 32, 32)
    scale = fp4_32_scale(absmax(x, 2))[:, :, None]
    x = round_e2m1(x * reciprocal_of_scale(scale)) * decode_ue8m0(scale)
    x = cast(x.reshape(BLOCK_HEADS, DIM), out.dtype.element_ty)
    tl.store(out + (row * heads + head) * DIM + channel, x, mask=inside)


def index_logits(
    q: Tensor,
    weights: Tensor,
    keys: RecordField,
    page_table: Tensor,
    req_of_row: Tensor,
    visible: Tensor,
    num_entries: int,
    *,
    exact_rounding: bool,
) -> Tensor:
    """Programs over tiles of rows and stretches of keys; plain keys take the reference."""
    if keys.record is not Record.FP4_32:
        return reference.index_logits(
            *(q, weights, keys, page_table, req_of_row, visible, num_entries),
            exact_rounding=exact_rounding,
        )
    scores = _empty_scores(q, num_entries)
    # One row a request is decoding. Otherwise neighbours share a request, mostly.
    kernel = _decode if len(q) <= len(page_table) else _prefill
    _launch(
        *(kernel, q, weights, keys, page_table, req_of_row, None, visible),
        *(scores, 1, exact_rounding),
    )
    return scores


def candidate_logits(
    q: Tensor,
    weights: Tensor,
    keys: RecordField,
    page_table: Tensor,
    req_of_row: Tensor,
    blocks: Tensor,
    visible: Tensor,
    *,
    block_size: int,
    exact_rounding: bool,
) -> Tensor:
    """Programs over rows and stretches of their candidates; plain keys take the reference."""
    if keys.record is not Record.FP4_32:
        return reference.candidate_logits(
            *(q, weights, keys, page_table, req_of_row, blocks, visible),
            block_size=block_size,
            exact_rounding=exact_rounding,
        )
    scores = _empty_scores(q, blocks.shape[1] * block_size)
    _launch(
        *(_decode, q, weights, keys, page_table, req_of_row, blocks, visible),
        *(scores, block_size, exact_rounding),
    )
    return scores


def _empty_scores(q: Tensor, columns: int) -> Tensor:
    """``[m, columns]`` whose rows begin at whole lines, for wide loads and stores."""
    scores = q.new_empty(q.shape[0], triton.cdiv(columns, 64) * 64)[:, :columns]
    return scores.fill_(-torch.inf) if debug.switch.enabled else scores


def _launch(
    kernel: Any,
    q: Tensor,
    weights: Tensor,
    keys: RecordField,
    page_table: Tensor,
    req_of_row: Tensor,
    blocks: Tensor | None,
    visible: Tensor,
    scores: Tensor,
    block_size: int,
    exact_rounding: bool,
) -> None:
    """Columns of the scores are entries, or members of blocks where there are any."""
    rows, heads, dim = q.shape
    columns = scores.shape[1]
    if not rows or not columns:
        return

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        row_tiles, tiles = triton.cdiv(rows, meta["ROWS"]), triton.cdiv(columns, meta["KEYS"])
        stretches = max(_PROGRAMS * 128 // meta["KEYS"] // row_tiles, triton.cdiv(tiles, _TILES))
        # Rows first: of other dimensions a grid has 65535 at most.
        return row_tiles, min(stretches, tiles)

    assert keys.scales is not None
    values = keys.values.view(torch.int32)
    kernel[grid](
        *(q.contiguous(), weights.contiguous(), values, keys.scales),
        *(page_table, req_of_row, blocks, visible, scores),
        *(values.stride(0), keys.scales.stride(0), page_table.stride(0)),
        *(
            0 if blocks is None else blocks.stride(0),
            scores.stride(0),
            rows,
            columns,
            bucket(rows * columns // 1024),
        ),
        HEADS=heads,
        BLOCK_HEADS=max(16, triton.next_power_of_2(heads)),
        DIM=dim,
        PER_PAGE=keys.values.shape[1],
        BLOCK_SIZE=block_size,
        EXACT=exact_rounding,
        FP8=_has_fp8_products(dim),
    )


def _has_fp8_products(dim: int) -> bool:
    """Otherwise keys become bf16; the interpreter's product of E5M2 need not be exact.

    Keys of small models, of less than 64 channels, are not worth it.
    """
    if INTERPRETED or dim < 64:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 89)


_KEY = ("size_class", "BLOCK_SIZE", "EXACT")


def _config(rows: int, keys: int, warps: int, registers: int | None) -> triton.Config:
    """With fewer registers more programs share a processor, and hide each other's latencies."""
    options = {"ROWS": rows, "KEYS": keys, "WARPS": warps}
    return triton.Config(options, num_warps=warps, maxnreg=registers)


_decode = tuned(
    [
        _config(1, 64, 4, 64),
        _config(1, 64, 4, None),
        _config(1, 128, 4, 96),
        _config(1, 128, 4, None),
        _config(1, 128, 8, 64),
        _config(1, 256, 8, None),
    ],
    _KEY,
)(score_rows)
_prefill = tuned(
    [
        _config(4, 64, 4, 168),
        _config(2, 128, 4, 168),
        _config(4, 128, 4, None),
        _config(8, 64, 4, None),
        _config(8, 128, 8, None),
    ],
    _KEY,
)(score_rows)
