"""Index queries and scores over packed keys (kernels.md 5, 6)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels import batch_invariance, debug
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import indexer as reference
from leadline.kernels.triton.formats import (
    absmax,
    cast,
    decode_e2m1,
    decode_ue8m0,
    dot_bf16,
    fp4_32_scale,
    reciprocal_of_scale,
    round_e2m1,
    to_bf16,
)
from leadline.kernels.triton.fp8_operands import (
    expand_rows,
    fold_rows,
    relu_product,
    split_channels,
)
from leadline.kernels.triton.hadamard import hadamard as transform
from leadline.kernels.triton.launch import INTERPRETED, bucket, tuned

# Programs of a launch: four on each of 132 SMs. Longer inputs give each at most so many tiles, so
# that requests of different length share a GPU evenly.
_PROGRAMS = 528
_TILES = 32
_PREPARED_HEADS = 32  # that a program prepares, at most


def prepare_index_query(q: Tensor, cos: Tensor, sin: Tensor, *, hadamard: bool = False) -> Tensor:
    """Programs of some heads of a row."""
    return _prepared(q, cos, sin, rope_dim=2 * cos.shape[1], hadamard=hadamard)


def quantize_index_query(q: Tensor) -> Tensor:
    """The same kernel without a rotation."""
    return _prepared(q, q, q, rope_dim=0)


def _prepared(
    q: Tensor, cos: Tensor, sin: Tensor, *, rope_dim: int, hadamard: bool = False
) -> Tensor:
    rows, heads, dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if rows:
        block = min(triton.next_power_of_2(heads), _PREPARED_HEADS)
        _prepare_query[(rows, triton.cdiv(heads, block))](
            *(q, cos, sin, out),
            *(q.stride(0), q.stride(1), cos.stride(0), heads),
            BLOCK_HEADS=block,
            DIM=dim,
            ROPE=rope_dim,
            HADAMARD=hadamard,
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
    HADAMARD: tl.constexpr,
):
    """Rotate the last ROPE channels of some heads of a row, and round to MXFP4."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
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
    if HADAMARD:
        x = to_bf16(transform(x)).to(tl.float32)
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
    one_each = batch_invariance.switch.enabled or len(q) <= len(page_table)
    kernel = _decode if one_each else _prefill[q.shape[1] > 32]
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
    kernel[grid](
        *(q.contiguous(), weights.contiguous(), keys.values, keys.scales),
        *(page_table, req_of_row, blocks, visible, scores),
        *(keys.values.stride(0), keys.scales.stride(0), page_table.stride(0)),
        *(
            0 if blocks is None else blocks.stride(0),
            scores.stride(0),
            rows,
            columns,
            0 if batch_invariance.switch.enabled else bucket(rows * columns // 1024),
        ),
        HEADS=heads,
        BLOCK_HEADS=max(16, triton.next_power_of_2(heads)),
        DIM=dim,
        PER_PAGE=keys.values.shape[1],
        BLOCK_SIZE=block_size,
        EXACT=exact_rounding,
        FP8=_has_fp8_products(),
    )


def _has_fp8_products() -> bool:
    """Otherwise keys become bf16; the interpreter's product of E5M2 need not be exact."""
    if INTERPRETED:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 89)


@triton.jit
def _logits(
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
):
    """Scores ``[ROWS, a stretch of columns]``; columns are entries, or members of blocks.

    Keys are the left operand, all heads of ROWS rows the right one. Rows of several requests take
    a turn for each request.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    request = tl.load(req_of_row + row, mask=live, other=-1).to(tl.int32)
    seen = tl.load(visible + row, mask=live, other=0).to(tl.int32)
    line = scores + row.to(tl.int64)[None, :] * score_stride

    # Every head of every row is a column of the product.
    lane = tl.arange(0, ROWS * BLOCK_HEADS)
    head, of_row = lane % BLOCK_HEADS, tl.program_id(0) * ROWS + lane // BLOCK_HEADS
    real = (head < HEADS) & (of_row < num_rows)
    at = of_row.to(tl.int64) * HEADS + head
    weight = tl.load(weights + at, mask=real, other=0.0).to(tl.float32)
    query = q + at[:, None] * DIM
    if FP8:
        channel = split_channels(DIM)[None, :]
        x = tl.load(query + channel, mask=real[:, None], other=0.0)
        x, power = fold_rows(x.to(tl.float32))
        weight *= power * 0.0001220703125  # 2^-13
        x = x.trans()
    else:
        x = tl.load(query + tl.arange(0, DIM)[None, :], mask=real[:, None], other=0.0).trans()

    # Above the diagonal nothing is read or written: programs share what the rows may see.
    most = num_columns
    if blocks is None:
        most = tl.max(seen)
    tiles = tl.cdiv(tl.cdiv(most, KEYS), tl.num_programs(1))
    begin = tl.program_id(1) * tiles
    end = tl.minimum(begin + tiles, tl.cdiv(most, KEYS))
    first = tl.min(tl.where(live, request, 0x7FFFFFFF))
    for turn in tl.range(first, tl.max(request) + 1):
        mine = live & (request == turn)
        limit = num_columns
        if blocks is None:
            limit = tl.max(tl.where(mine, seen, 0))
        table = page_table + turn * table_stride
        for tile in tl.range(begin, tl.minimum(end, tl.cdiv(limit, KEYS))):
            column = tile * KEYS + tl.arange(0, KEYS)
            if blocks is None and PER_PAGE % KEYS == 0:
                # One page: its rows may all be read, and what nobody sees is masked below.
                entry, exists = column, None
                page = tl.load(table + tile // (PER_PAGE // KEYS)).to(tl.int64)
                inner = tile % (PER_PAGE // KEYS) * KEYS + tl.arange(0, KEYS)
            else:
                entry = column
                if blocks is not None:
                    listed = blocks + tl.program_id(0).to(tl.int64) * blocks_stride
                    block = tl.load(listed + column // BLOCK_SIZE, mask=column < limit, other=-1)
                    entry = block.to(tl.int32) * BLOCK_SIZE + column % BLOCK_SIZE
                exists = (entry >= 0) & (entry < tl.max(seen)) & (column < limit)
                page = tl.load(table + entry // PER_PAGE, mask=exists, other=0).to(tl.int64)
                inner = entry % PER_PAGE
            score = _score(
                *(values + page * value_stride + inner * (DIM // 2), exists),
                *(scales + page * scale_stride + inner * (DIM // 32), x, weight),
                *(ROWS, BLOCK_HEADS, DIM, EXACT, FP8),
            )
            shown = entry[:, None] < seen[None, :]
            if blocks is not None:
                shown &= entry[:, None] >= 0
            score = cast(tl.where(shown, score, -float("inf")), scores.dtype.element_ty)
            inside = mine[None, :] & (column < num_columns)[:, None]
            tl.store(line + column[:, None], score, mask=inside)


@triton.jit
def _score(
    value_rows,
    exists,
    scale_rows,
    x,
    weight,
    ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    EXACT: tl.constexpr,
    FP8: tl.constexpr,
):
    """``[KEYS, ROWS]`` float32: the sum over heads of ``relu(q . k) w``."""
    KEYS: tl.constexpr = value_rows.shape[0]
    there = None if exists is None else exists[:, None]
    other = None if exists is None else 0
    part = tl.arange(0, DIM // 32)[None, :]
    exponents = tl.load(scale_rows[:, None] + part, mask=there, other=other)
    if FP8:
        byte = tl.arange(0, DIM // 2)[None, :]
        codes = tl.load(value_rows[:, None] + byte, mask=there, other=other)
        key, exponent = expand_rows(codes, exponents)
        dot = tl.dot(key, x)
    else:
        channel = tl.arange(0, DIM)[None, :]
        codes = tl.load(value_rows[:, None] + channel // 2, mask=there, other=other).to(tl.int32)
        key = decode_e2m1(codes >> (channel % 2 * 4)).reshape(KEYS, DIM // 32, 32)
        key = to_bf16(key * decode_ue8m0(exponents)[:, :, None]).reshape(KEYS, DIM)
        dot = dot_bf16(key, x, tl.zeros((KEYS, ROWS * BLOCK_HEADS), tl.float32))
    # Powers of two commute with roundings, so those of folded rows may be applied at the end.
    if EXACT and FP8:
        dot, weight = tl.broadcast(dot, weight.to(tl.bfloat16)[None, :])
        product = relu_product(dot, weight)
    elif EXACT:
        dot = to_bf16(dot).to(tl.float32)
        product = to_bf16(
            tl.maximum(dot, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
        ).to(tl.float32)
    else:
        # Twice the relu, by an addition: maxima, and what expands the keys, share another pipe.
        product = (dot + tl.abs(dot)) * (0.5 * weight)[None, :]
    total = tl.sum(product.reshape(KEYS, ROWS, BLOCK_HEADS), axis=2)
    if FP8:
        power = (exponent << 23).to(tl.float32, bitcast=True)[:, None]
        total = total * power + 0.0 * power  # NaN where the power is infinite
    return total


_KEY = ("size_class", "BLOCK_SIZE", "EXACT")
_decode = tuned(
    [
        triton.Config({"ROWS": 1, "KEYS": keys}, num_warps=warps, num_stages=stages)
        for keys, warps, stages in (
            (128, 4, 3),
            (128, 4, 5),
            (128, 4, 7),
            (256, 8, 5),
            (64, 4, 5),  # of V4, a page: one address for all of them
        )
    ],
    _KEY,
    variant="decode",
)(_logits)
# By whether there are more than 32 heads: sums of all of them are in registers.
_prefill = {
    many: tuned(
        [
            triton.Config({"ROWS": rows, "KEYS": keys}, num_warps=4, num_stages=3)
            for rows, keys in sizes
        ],
        _KEY,
        variant=name,
    )(_logits)
    for many, name, sizes in (
        (False, "prefill", ((8, 64), (4, 128))),
        (True, "prefill, 64 heads", ((4, 64), (2, 128))),
    )
}
