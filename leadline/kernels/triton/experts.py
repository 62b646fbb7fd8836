"""Routed experts with MXFP4 weights, few tokens per expert or many (kernels.md 10).

Four launches: ``expert_tiles.prepare``; gate and up with SwiGLU, the routing weight and the FP8
rounding behind them, by 32 channels since a program has no more of a row; down, which leaves one
row per pair; and the sum over a row's pairs, in order.
Programs of the two products are (column block, tile of one expert's pairs), blocks running fastest:
an expert's weights and inputs then meet in L2, and come from memory once.

Decode is a stream of weights. To keep 4.4 TB/s busy an H200 wants some 50 KB in flight on each SM,
and warps enough to hide everything else: 64 rows of 256 channels are 9 KB, two such stages are on
their way in each of five resident programs, 2.9 instructions a weight; of four where tiles have 16
pairs. A prompt reuses an expanded weight for up to 128 tokens, and the products are what counts.
On Hopper ``experts_fp8_hopper`` takes up to some pairs an expert, ``experts_hopper`` more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels import batch_invariance
from leadline.kernels.batch_invariance import planned_rows
from leadline.kernels.packed import LinearWeight, PackedWeight, Weight
from leadline.kernels.reference import experts as reference
from leadline.kernels.triton import experts_fp8, experts_fp8_hopper, experts_hopper
from leadline.kernels.triton.expert_tiles import is_size, prepare, span
from leadline.kernels.triton.formats import absmax, cast, fp8_scale, round_trip_e4m3, to_bf16
from leadline.kernels.triton.launch import bucket, is_hopper, tuned
from leadline.kernels.triton.mxfp4 import plane_offset, product
from leadline.kernels.triton.swiglu import clamped_swiglu
from leadline.kernels.triton.tuning import Tuner

# Pairs an expert from which on arithmetic counts (kernels.md 10.3); so many that Hopper's own bf16
# kernels are faster than those for all; and up to which its FP8 ones are faster than both.
_MANY = 32
_SOME = 16
_SEVERAL = 64


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Weight,
    w2: Weight,
    *,
    limit: float,
    row_scales: bool = False,
    shared: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Packed stacks by these kernels; plain ones, of small test checkpoints, by the reference.

    ``row_scales`` count where experts have many rows. Few wait for weights, not for arithmetic, and
    keep the finer scales.
    """
    if isinstance(w13, LinearWeight) or isinstance(w2, LinearWeight):
        return reference.routed_experts(
            x, ids, weights, w13, w2, limit=limit, row_scales=row_scales, shared=shared
        )
    num_rows, per_row = ids.shape
    width = w2.shape[1]
    dtype = torch.float32 if shared is None else x.dtype
    out = torch.empty(num_rows, width, dtype=dtype, device=x.device)
    if not num_rows:
        return out
    row_scales &= w13.quantizes_input and w2.quantizes_input
    per_expert = planned_rows(num_rows) * per_row / len(w2.codes)
    if row_scales and per_expert >= _MANY:
        pair_outputs = experts_fp8.pair_outputs
    elif is_hopper() and per_expert <= _SEVERAL and experts_fp8_hopper.fits(w13, w2):
        pair_outputs = experts_fp8_hopper.pair_outputs
    elif is_hopper() and per_expert >= _SOME and experts_hopper.fits(w2):
        pair_outputs = experts_hopper.pair_outputs
    else:
        pair_outputs = _pair_outputs
    outputs = pair_outputs(x, ids, weights, w13, w2, limit=limit)
    added = None if shared is None else shared().contiguous()
    block = min(triton.next_power_of_2(width), 1024)
    _sum_pairs[(num_rows, triton.cdiv(width, block))](
        outputs, ids.contiguous(), added, out, width, PER_ROW=per_row, BLOCK=block
    )
    return out


def _pair_outputs(
    x: Tensor, ids: Tensor, weights: Tensor, w13: PackedWeight, w2: PackedWeight, *, limit: float
) -> Tensor:
    """Each expert's output for each of its rows ``[m k, D]``; rows of id -1 are not written."""
    num_experts, width, hidden_width = w2.shape
    num_pairs, per_row = ids.numel(), ids.shape[1]
    planned_pairs = planned_rows(ids.shape[0]) * per_row
    tile_size = _tile_size(planned_pairs // num_experts)
    tiles, planes = prepare(
        x,
        ids,
        num_experts=num_experts,
        tile_size=tile_size,
        input_block=w13.input_block if w13.quantizes_input else 0,
    )
    capacity = len(tiles.spans)
    sizes = {"D": width, "F": hidden_width, "TILE": tile_size, "batch": bucket(planned_pairs)}
    hidden = torch.empty(num_pairs, hidden_width, dtype=x.dtype, device=x.device)
    # Tiles that are not full shrink, unless others' pairs must not change how one is multiplied.
    sizes["HALVINGS"] = 0 if batch_invariance.switch.enabled else min(tile_size // 8 - 1, 2)
    gate_up, down = _PROMPT if tile_size >= 64 else _DECODE if tile_size > 16 else _STREAMING
    gate_up[lambda meta: (triton.cdiv(hidden_width, meta["BLOCK_F"]), capacity)](
        planes,
        w13.codes.view(torch.uint16),
        w13.scales,
        weights.contiguous(),
        tiles.pairs,
        tiles.spans,
        hidden,
        limit,
        PER_ROW=per_row,
        QUANTIZES=w2.quantizes_input,
        **sizes,
    )
    outputs = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    down[lambda meta: (triton.cdiv(width, meta["BLOCK_D"]), capacity)](
        hidden,
        w2.codes.view(torch.uint16),
        w2.scales,
        tiles.pairs,
        tiles.spans,
        outputs,
        **sizes,
    )
    return outputs


def _tile_size(mean: int) -> int:
    """Pairs of a tile, from those of an expert if all are chosen alike: twice that, if it can."""
    return min(max(bucket(2 * mean), 8), 128)


@triton.jit
def _gate_up(
    planes,
    codes,
    scales,
    weights,
    pairs,
    spans,
    hidden,
    limit,
    batch,
    D: tl.constexpr,
    F: tl.constexpr,
    PER_ROW: tl.constexpr,
    QUANTIZES: tl.constexpr,
    TILE: tl.constexpr,
    HALVINGS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Hidden columns of one tile of pairs; ``batch`` is a key of tuning only."""
    expert, first, size = span(spans, tl.program_id(1))
    codes += expert * (2 * F * (D // 4))
    scales += expert * (2 * F * (D // 32))
    for halvings in tl.static_range(HALVINGS + 1):
        if (expert >= 0) & is_size(size, TILE >> halvings, halvings == HALVINGS):
            _gate_up_tile(
                planes,
                codes,
                scales,
                weights,
                pairs,
                first,
                size,
                hidden,
                limit,
                D,
                F,
                PER_ROW,
                QUANTIZES,
                TILE <= 16,
                TILE >> halvings,
                BLOCK_F,
                BLOCK_K,
            )


@triton.jit
def _gate_up_tile(
    planes,
    codes,
    scales,
    weights,
    pairs,
    first,
    size,
    hidden,
    limit,
    D: tl.constexpr,
    F: tl.constexpr,
    PER_ROW: tl.constexpr,
    QUANTIZES: tl.constexpr,
    STREAMED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The same of one expert, whose matrix ``codes`` and ``scales`` point to."""
    place = first + tl.arange(0, TILE)
    live = tl.arange(0, TILE) < size
    pair = tl.load(pairs + place, mask=live, other=0)
    # Gate rows, then the up rows of the same columns: one product, and both of a column are here.
    row = tl.arange(0, 2 * BLOCK_F)
    column = tl.program_id(0) * BLOCK_F + row % BLOCK_F
    total = product(
        codes,
        scales,
        (tl.minimum(column, F - 1) if F % BLOCK_F != 0 else column) + row // BLOCK_F * F,
        planes,
        tl.where(live, pair // PER_ROW, -1).to(tl.int64),
        D,
        BLOCK_K,
        STREAMED,
    )
    total = to_bf16(total).to(tl.float32)
    gate, up = tl.split(total.reshape(2, BLOCK_F, TILE).permute(1, 2, 0))
    # The weight counts before the rounding (v41-model 5.3).
    weight = tl.load(weights + pair, mask=live, other=0.0).to(tl.float32)
    value = to_bf16(clamped_swiglu(gate, up, limit) * weight[None, :])
    if QUANTIZES:
        blocks = value.to(tl.float32).reshape(BLOCK_F // 32, 32, TILE)
        blocks = round_trip_e4m3(blocks, fp8_scale(absmax(blocks, 1))[:, None, :])
        value = to_bf16(blocks.reshape(BLOCK_F, TILE))
    column = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    at = place.to(tl.int64)[None, :] * F + plane_offset(column, F, STREAMED)[:, None]
    tl.store(hidden + at, value, mask=(column < F)[:, None] & live[None, :])


@triton.jit
def _down(
    hidden,
    codes,
    scales,
    pairs,
    spans,
    outputs,
    batch,
    D: tl.constexpr,
    F: tl.constexpr,
    TILE: tl.constexpr,
    HALVINGS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Output columns of one tile of pairs, each pair's row at its own place."""
    expert, first, size = span(spans, tl.program_id(1))
    codes += expert * (D * (F // 4))
    scales += expert * (D * (F // 32))
    for halvings in tl.static_range(HALVINGS + 1):
        if (expert >= 0) & is_size(size, TILE >> halvings, halvings == HALVINGS):
            _down_tile(
                hidden,
                codes,
                scales,
                pairs,
                first,
                size,
                outputs,
                D,
                F,
                TILE <= 16,
                TILE >> halvings,
                BLOCK_D,
                BLOCK_K,
            )


@triton.jit
def _down_tile(
    hidden,
    codes,
    scales,
    pairs,
    first,
    size,
    outputs,
    D: tl.constexpr,
    F: tl.constexpr,
    STREAMED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The same of one expert, whose matrix ``codes`` and ``scales`` point to."""
    place = first + tl.arange(0, TILE)
    live = tl.arange(0, TILE) < size
    column = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = product(
        codes,
        scales,
        tl.minimum(column, D - 1) if D % BLOCK_D != 0 else column,
        hidden,
        tl.where(live, place, -1).to(tl.int64),
        F,
        BLOCK_K,
        STREAMED,
    )
    pair = tl.load(pairs + place, mask=live, other=0).to(tl.int64)
    at = pair[None, :] * D + column[:, None]
    tl.store(outputs + at, to_bf16(total), mask=(column < D)[:, None] & live[None, :])


@triton.jit
def _sum_pairs(outputs, ids, shared, out, width, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a token's pairs in their order, but for expert -1, then its row of ``shared``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(PER_ROW):
        pair = row * PER_ROW + slot
        there = (column < width) & (tl.load(ids + pair) >= 0)
        total += tl.load(outputs + pair * width + column, mask=there, other=0.0).to(tl.float32)
    at = row * width + column
    if shared is not None:
        total += tl.load(shared + at, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + at, cast(total, out.dtype.element_ty), mask=column < width)


def _variants(
    name: str, configs: list[tuple[int, int, int, int, int | None]]
) -> tuple[Tuner, Tuner]:
    """Both products, tuned over (rows of a product, BLOCK_K, warps, stages, registers)."""
    key = ["D", "F", "TILE", "batch"]
    gate_up, down = (
        [
            triton.Config(
                {block: rows // share, "BLOCK_K": k},
                num_warps=warps,
                num_stages=stages,
                maxnreg=registers,
            )
            for rows, k, warps, stages, registers in configs
        ]
        for block, share in (("BLOCK_F", 2), ("BLOCK_D", 1))
    )
    return tuned(gate_up, key, variant=name)(_gate_up), tuned(down, key, variant=name)(_down)


# A stage takes 128 bytes of a row at least: memory gives far less where it takes 64. Of n stages,
# n - 1 are on their way.
_STREAMING = _variants(
    "streaming",
    [
        (64, 256, 4, 3, None),
        (64, 256, 4, 3, 80),
        (64, 256, 4, 6, None),
        (64, 256, 2, 5, None),
        (128, 256, 4, 3, 128),
    ],
)
_DECODE = _variants("decode", [(64, 256, 4, 3, None), (64, 256, 4, 4, None)])
# Two programs just fit on an SM, and one expands while the other multiplies.
_PROMPT = _variants("prompt", [(128, 128, 4, 3, None)])
