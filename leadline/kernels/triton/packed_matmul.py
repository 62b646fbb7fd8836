"""Products of tokens with FP8 weights as stored (kernels.md 9 and 11).

A decode step waits for the weights' bytes, so they are read once, as bytes. Few tokens meet them on
FP8 tensor cores (``streamed_matmul``); for more, and on other GPUs, they become bf16 in registers:
bit moves and one multiplication by the tile's scale, here or in Hopper's own kernel
(``packed_matmul_hopper``). Many programs share a small matrix, along the input too; their partial
sums are added in order by a second launch, which also applies what follows the product, up to the
form in which the next product takes its input. Long prompts wait for arithmetic instead: the
weights are written out as bf16 once a call, which costs a few percent, and multiplied by torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from leadline.kernels.batch_invariance import planned_rows
from leadline.kernels.packed import PackedWeight
from leadline.kernels.triton import packed_matmul_hopper
from leadline.kernels.triton.arrangement import Arranged, arrange
from leadline.kernels.triton.formats import cast, decode_e4m3, decode_ue8m0, dot_bf16, to_bf16
from leadline.kernels.triton.launch import INTERPRETED, is_hopper, processors
from leadline.kernels.triton.operand import Operand, encode
from leadline.kernels.triton.partial_sums import add_parts, add_parts_into
from leadline.kernels.triton.quant import on_fp8_grid, round_trip_fp8
from leadline.kernels.triton.streamed_matmul import encodes, streamed_matmul, streams


@dataclass(frozen=True, slots=True)
class _Tile:
    """What one program multiplies at a time.

    Attributes:
        tokens: at most; a program takes the power of two at or above what there is.
        rows, channels: of the weight.
        resident: programs that keep a multiprocessor's loads in flight.
    """

    tokens: int
    rows: int
    channels: int
    num_warps: int
    num_stages: int
    resident: int


# Few tokens are the right operand of the matrix instructions, the side that may be narrow, and
# two warps take the older ones, which read codes from shared memory four at a time.
_TILES = (
    _Tile(32, 64, 128, num_warps=2, num_stages=4, resident=4),
    _Tile(64, 128, 64, num_warps=4, num_stages=4, resident=3),
    _Tile(128, 128, 64, num_warps=8, num_stages=4, resident=2),
)
_TOKENS_FIRST_FROM = 64
# Rounding the input costs each program as much as some of its weights; a launch costs 1 us.
_ROUNDED_ON_THE_WAY = 8
_EXPANDED_FROM = 512
_MOST_SPLITS = 16

_NVIDIA = tl.constexpr(not INTERPRETED and torch.version.hip is None)
# Weights are multiplied as 2^-20 times their value: scales up to 2^27 then fit bf16. Beyond, any
# code but 0 is a magnitude that loading refuses.
_SHRINK = tl.constexpr(20)
_GROW = tl.constexpr(2.0**20)


def packed_matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    """``x W^T`` for each group, summed in float32.

    Args:
        x: ``[m, G, in]`` bf16.
        weight: FP8_BLOCK32 ``[G, out, in]`` without NaN (loading refuses them); ``out`` a multiple
            of 32 where there are several groups.

    Returns:
        ``[m, G out]`` bf16.
    """
    tokens, groups, _ = x.shape
    if not tokens:
        return x.new_empty(0, groups * weight.codes.shape[1])
    return add_parts(_multiply(x, weight))


def chained_matmul(
    x: Tensor, first: PackedWeight, second: PackedWeight, *, swiglu_limit: float | None = None
) -> Tensor:
    """A product of a product; the first one ends with what the second wants of its input.

    Args:
        x: ``[m, G, in]`` bf16.
        first: as of ``packed_matmul``.
        second: likewise, ``[1, out, G first's out]``, or half as wide behind SwiGLU.
        swiglu_limit: clamped SwiGLU of the first product, gate rows first; None for none.

    Returns:
        ``[m, out]`` bf16.
    """
    tokens = len(x)
    if not tokens:
        return x.new_empty(0, second.codes.shape[1])
    parts = _multiply(x, first)
    if _is_streamed(tokens, second):
        operand = Operand.empty(tokens, second)
        add_parts_into(parts, operand, swiglu_limit=swiglu_limit)
        return add_parts(streamed_matmul(operand, second).flatten(2))
    input_block = second.input_block if second.quantizes_input else 0
    if _suits_hopper(tokens, second):
        arranged = Arranged.empty(tokens, second)
        add_parts_into(parts, arranged, input_block=input_block, swiglu_limit=swiglu_limit)
        return add_parts(packed_matmul_hopper.multiply(arranged, second).flatten(2))
    hidden = x.new_empty(tokens, 1, second.codes.shape[2])
    add_parts_into(parts, hidden, input_block=input_block, swiglu_limit=swiglu_limit)
    return add_parts(_multiply(hidden, second, input_rounded=True))


def _is_streamed(tokens: int, weight: PackedWeight) -> bool:
    return _has_fp8_tensor_cores() and streams(planned_rows(tokens), weight)


def _suits_hopper(tokens: int, weight: PackedWeight) -> bool:
    """Whether Hopper's own kernel is the fastest way for what is not streamed."""
    return (
        is_hopper()
        and planned_rows(tokens) < _EXPANDED_FROM
        and weight.codes.shape[2] % packed_matmul_hopper.CHANNELS == 0
    )


def _multiply(x: Tensor, weight: PackedWeight, *, input_rounded: bool = False) -> Tensor:
    """Partial sums ``[splits, m, G out]``: float32, or the only one, bf16.

    Args:
        x: ``[m, G, in]`` bf16, m at least 1.
        weight: of the product.
        input_rounded: ``x`` has the values to which the weight wants its input rounded.
    """
    tokens, groups, _ = x.shape
    planned = planned_rows(tokens)
    rows = weight.codes.shape[1]
    x = x if x.stride(2) == 1 else x.contiguous()
    if _is_streamed(tokens, weight):
        given = x if encodes(planned, weight) else encode(x, weight)
        return streamed_matmul(given, weight).flatten(2)
    if _suits_hopper(tokens, weight):
        return packed_matmul_hopper.multiply(arrange(x, weight), weight).flatten(2)
    rounds_input = weight.quantizes_input and not input_rounded
    if rounds_input and planned > _ROUNDED_ON_THE_WAY:
        x, rounds_input = round_trip_fp8(x, weight.input_block), False
    if planned >= _EXPANDED_FROM:
        parts = x.new_empty(1, tokens, groups, rows)
        matrices = _expand(weight).transpose(1, 2)
        torch.bmm(x.transpose(0, 1), matrices, out=parts[0].transpose(0, 1))
    else:
        parts = _multiply_tiles(x, weight, weight.input_block if rounds_input else 0)
    return parts.flatten(2)


def _multiply_tiles(x: Tensor, weight: PackedWeight, input_block: int) -> Tensor:
    """Partial sums ``[splits, m, G, out]``, float32, or the only one, bf16.

    ``input_block`` channels of ``x`` are rounded together on their way, or it is 0.
    """
    tokens, groups, width = x.shape
    rows = weight.codes.shape[1]
    planned = planned_rows(tokens)
    tile = next((tile for tile in _TILES if tile.tokens >= planned), _TILES[-1])
    block = min(tile.tokens, triton.next_power_of_2(planned))
    planned_blocks, row_blocks = triton.cdiv(planned, block), groups * triton.cdiv(rows, tile.rows)
    splits = _splits(
        tile,
        planned_blocks * row_blocks,
        chunks=triton.cdiv(width, tile.channels),
        sums=planned_blocks * block * groups * rows,
        processors=processors(x.device),
    )
    dtype = torch.float32 if splits > 1 else torch.bfloat16
    parts = x.new_empty(splits, tokens, groups, rows, dtype=dtype)
    _multiply_tile[(triton.cdiv(tokens, block), row_blocks, splits)](
        x,
        weight.codes,
        weight.scales,
        parts,
        tokens,
        rows,
        x.stride(0),
        x.stride(1),
        WIDTH=width,
        GROUPS=groups,
        SPLITS=splits,
        BLOCK_T=block,
        BLOCK_N=tile.rows,
        BLOCK_K=tile.channels,
        INPUT_BLOCK=input_block,
        TOKENS_FIRST=block >= _TOKENS_FIRST_FROM,
        EVEN_K=width % (splits * tile.channels) == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return parts


def _splits(tile: _Tile, blocks: int, *, chunks: int, sums: int, processors: int) -> int:
    """Into how many parts to cut the input, so that every multiprocessor has as much to do.

    Costs are in steps of one tile on one multiprocessor: those of the busiest one, where a program
    takes one to begin; the second launch; the partial sums that go through L2 and back.

    Args:
        tile: what a program multiplies at a time.
        blocks: programs of one split.
        chunks: steps of all splits together.
        sums: values of the result.
        processors: multiprocessors of the GPU.
    """

    def cost(splits: int) -> float:
        programs = triton.cdiv(blocks * splits, processors)
        steps = max(programs, tile.resident) * (1 + triton.cdiv(chunks, splits))
        if splits == 1:
            return steps
        return steps + 5 + 4 * splits * sums / (processors * tile.rows * tile.channels)

    return min(range(1, min(_MOST_SPLITS, chunks) + 1), key=cost)


@functools.cache
def _has_fp8_tensor_cores() -> bool:
    """And launches that overlap, which make up for the one that encodes the tokens."""
    return INTERPRETED or cuda_capability_geq(9)


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_tile(
    x,
    codes,
    scales,
    out,
    num_tokens,
    num_rows,
    x_stride,
    x_group_stride,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """A block of tokens by a block of a group's rows, over one part of the input."""
    blocks = tl.cdiv(num_rows, BLOCK_N)
    group = tl.program_id(1) // blocks
    split = tl.program_id(2)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.program_id(1) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK_K // 32)
    columns: tl.constexpr = (WIDTH + 31) // 32
    part: tl.constexpr = tl.cdiv(tl.cdiv(WIDTH, BLOCK_K), SPLITS) * BLOCK_K
    live = token[:, None] < num_tokens
    stored_row = tl.minimum(row, num_rows - 1)

    of_token = x + token[:, None].to(tl.int64) * x_stride + group * x_group_stride + channel
    at_code = (group * num_rows + stored_row)[:, None].to(tl.int64) * WIDTH + channel
    at_scale = (group * tl.cdiv(num_rows, 32) + stored_row // 32)[:, None] * columns
    if TOKENS_FIRST:
        sums = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    else:
        sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    # One step ahead: these loads are too small for the pipeline that fetches the others.
    exponents = tl.load(scales + at_scale + tl.minimum(split * part // 32 + column, columns - 1))
    for step in tl.range(0, part, BLOCK_K):
        start = split * part + step
        if EVEN_K:
            code = tl.load(codes + at_code + start)
            value = tl.load(of_token + start, mask=live, other=0.0)
        else:
            inside = start + channel < WIDTH
            code = tl.load(codes + at_code + start, mask=inside, other=0)
            value = tl.load(of_token + start, mask=live & inside, other=0.0)
        weight = _shrunken_bf16(code, exponents)
        following = (start + BLOCK_K) // 32 + column
        exponents = tl.load(scales + at_scale + tl.minimum(following, columns - 1))
        if INPUT_BLOCK:
            value = on_fp8_grid(value.to(tl.float32), INPUT_BLOCK)
        left, right = (value, weight.T) if TOKENS_FIRST else (weight, value.T)
        sums = dot_bf16(left, right, sums)
    if not TOKENS_FIRST:
        sums = sums.T
    at = ((split * num_tokens + token).to(tl.int64) * GROUPS + group)[:, None] * num_rows + row
    inside = live & (row < num_rows)
    tl.store(out + at, cast(sums * _GROW, out.dtype.element_ty), mask=inside)


@triton.jit
def _shrunken_bf16(codes, exponents):
    """Codes ``[n, k]`` and a scale for each row and 32 columns -> 2^-20 times the values, bf16.

    The exponent bits of an E4M3 code, put where bf16 has its own, are a factor of 2^120 too small,
    subnormal codes included.
    """
    rows: tl.constexpr = codes.shape[0]
    width: tl.constexpr = codes.shape[1]
    factor = tl.minimum(exponents.to(tl.int32) + (120 - _SHRINK), 254)[:, :, None]
    factor = tl.broadcast_to(factor, (rows, width // 32, 32)).reshape(rows, width)
    if not _NVIDIA:
        power = (factor << 23).to(tl.float32, bitcast=True)  # of two, 2^120 too large
        return to_bf16(decode_e4m3(codes) * 7.52316384526264e-37 * power)
    bits = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, low_magnitude, high_magnitude;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        shr.u32 low_magnitude, low, 4;
        shr.u32 high_magnitude, high, 4;
        and.b32 low, low, 0x80008000;
        and.b32 high, high, 0x80008000;
        lop3.b32 $0, low_magnitude, 0x07F007F0, low, 0xEA;
        lop3.b32 $1, high_magnitude, 0x07F007F0, high, 0xEA;
        }
        """,
        "=r,=r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )
    return bits * (factor << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


def _expand(weight: PackedWeight) -> Tensor:
    """The exact values, bf16 ``[G, out, in]``."""
    groups, rows, width = weight.codes.shape
    dense = weight.codes.new_empty(groups, rows, width, dtype=torch.bfloat16)
    block = 512
    grid = (groups * triton.cdiv(rows, 32), triton.cdiv(width, block))
    _expand_tiles[grid](weight.codes, weight.scales, dense, rows, width, block, num_warps=4)
    return dense


@triton.jit
def _expand_tiles(codes, scales, dense, num_rows, width, BLOCK: tl.constexpr):
    """The 32 rows that share their scales, ``BLOCK`` columns of them."""
    blocks = tl.cdiv(num_rows, 32)
    row = tl.program_id(0) % blocks * 32 + tl.arange(0, 32)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    num_columns = tl.cdiv(width, 32)
    inside = (row < num_rows) & (channel < width)
    at = (tl.program_id(0) // blocks * num_rows + row).to(tl.int64) * width + channel
    code = tl.load(codes + at, mask=inside, other=0)
    at_scale = tl.program_id(0) * num_columns + column
    scale = decode_ue8m0(tl.load(scales + at_scale, mask=column < num_columns, other=127))
    scale = tl.broadcast_to(scale[:, None], (BLOCK // 32, 32)).reshape(1, BLOCK)
    tl.store(dense + at, to_bf16(decode_e4m3(code) * scale), mask=inside)
