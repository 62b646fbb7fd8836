"""Products of few tokens with FP8 weights as stored, on FP8 tensor cores (kernels.md 9 and 11).

A decode step waits for the weights' bytes. Turned into bf16 they keep the integer units busy for
most of the time in which they arrive; here they go from memory to the tensor cores untouched.
Tokens meet them as E4M3 codes: those of the blocks to which a product rounds its input, or
two codes for each bf16 value, the second for what the first one leaves. Sums over channels of
different scales are kept apart: a token has a column for each of the blocks of a step, which holds
zeros in place of the others. Aligned weights have blocks of 128 channels, others of 32.

NVIDIA only, from sm_90 on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.batch_invariance import planned_rows
from leadline.kernels.packed import PackedWeight
from leadline.kernels.triton.formats import (
    absmax,
    cast,
    decode_e4m3,
    decode_ue8m0,
    encode_e4m3,
    fp8_scale,
    reciprocal_of_scale,
)
from leadline.kernels.triton.launch import INTERPRETED, hold_next, overlapped, processors
from leadline.kernels.triton.quant import on_fp8_grid

_NATIVE = tl.constexpr(not INTERPRETED)


@dataclass(frozen=True, slots=True)
class _Tile:
    """What one program multiplies at a time, at most so many lines of codes."""

    lines: int
    channels: int
    num_stages: int


# Long steps wait less often, short ones leave room for more programs on a multiprocessor.
_LONG = _Tile(16, 256, num_stages=3)
_TILES = (
    _Tile(32, 128, num_stages=4),
    _Tile(64, 128, num_stages=3),
)
_ROWS = 64
_RESIDENT = 3  # programs of a multiprocessor
_LEAST_COLUMNS = 16  # of FP8 matrix instructions that read both operands from shared memory
_ENCODED = 512


@dataclass(frozen=True, slots=True)
class Operand:
    """Tokens as a weight meets them, of whichever kernel wrote them.

    Attributes:
        codes: ``[G, m terms, in]`` E4M3, uint8; the terms of a token one after the other.
        powers: ``[G, ceil(in / scaled), m terms]`` float32: those of a step's columns lie together.
        terms: codes that stand for a value.
        scaled: channels that share a scale.
        input_block: channels that share one in what the product rounds its input to.
    """

    codes: Tensor
    powers: Tensor
    terms: int
    scaled: int
    input_block: int

    @staticmethod
    def empty(tokens: int, weight: PackedWeight) -> Operand:
        """For this weight, to be written by ``store_operand``."""
        terms = 1 if weight.quantizes_input else 2
        scaled = 128 if weight.aligned else 32
        groups, _, width = weight.codes.shape
        lines = tokens * terms
        codes = weight.codes.new_empty(groups, lines, width)
        powers = codes.new_empty(groups, triton.cdiv(width, scaled), lines, dtype=torch.float32)
        return Operand(codes, powers, terms, scaled, weight.input_block)


def streams(tokens: int, weight: PackedWeight) -> bool:
    """Whether ``streamed_matmul`` is the fastest way, on a GPU that has it."""
    if weight.aligned:
        return tokens <= (256 if weight.quantizes_input else 64)
    return tokens <= (8 if weight.quantizes_input else 4)


def streamed_matmul(x: Operand, weight: PackedWeight) -> Tensor:
    """``x W^T`` for each group, in parts yet to be added.

    Args:
        x: at least one token, as ``encode`` makes it for this weight.
        weight: as ``packed_matmul`` takes it.

    Returns:
        ``[parts, m, G, out]`` float32, or bf16 where there is one part.
    """
    groups, rows, width = weight.codes.shape
    terms, block = x.terms, x.scaled
    tokens = x.codes.shape[1] // terms
    row_blocks = groups * triton.cdiv(rows, _ROWS)
    resident = _RESIDENT * processors(weight.codes.device)
    planned = planned_rows(tokens)
    lines = triton.next_power_of_2(planned) * terms
    # Of blocks of 32, more than 4 lines would have too many columns in a long step.
    if lines <= _LONG.lines * block // 128 and row_blocks <= resident:
        tile = _LONG
    else:
        tile = next((tile for tile in _TILES if tile.lines >= lines), _TILES[-1])
    lines = max(min(lines, tile.lines), _LEAST_COLUMNS * block // tile.channels)
    line_blocks = triton.cdiv(tokens * terms, lines)
    steps = triton.cdiv(width, tile.channels)
    most = max(resident // (row_blocks * triton.cdiv(planned * terms, lines)), 1)
    splits = next(n for n in range(min(most, steps), 0, -1) if steps % n == 0)

    dtype = torch.float32 if splits > 1 else torch.bfloat16
    parts = x.powers.new_empty(splits, tokens, groups, rows, dtype=dtype)
    _stream[(line_blocks, row_blocks, splits)](
        x.codes.view(torch.float8_e4m3fn),
        x.powers,
        weight.codes.view(torch.float8_e4m3fn),
        weight.scales,
        parts,
        tokens,
        rows,
        WIDTH=width,
        GROUPS=groups,
        STEPS=steps // splits,
        TERMS=terms,
        LINES=lines,
        SCALED=block,
        BLOCK_N=_ROWS,
        BLOCK_K=tile.channels,
        num_warps=4,
        num_stages=tile.num_stages,
        **overlapped(),
    )
    return parts


def encode(x: Tensor, weight: PackedWeight) -> Operand:
    """bf16 ``[m, G, in]``, rounded to FP8 if the weight wants that."""
    tokens, groups, width = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    operand = Operand.empty(tokens, weight)
    _encode_tokens[(tokens, groups, triton.cdiv(width, _ENCODED))](
        x,
        operand.codes,
        operand.powers,
        x.stride(0),
        x.stride(1),
        width,
        TERMS=operand.terms,
        INPUT_BLOCK=operand.input_block,
        SCALED=operand.scaled,
        BLOCK=_ENCODED,
        num_warps=2,
        **overlapped(),
    )
    return operand


@triton.jit
def _encode_tokens(
    x,
    codes,
    powers,
    x_stride,
    x_group_stride,
    width,
    TERMS: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of one token's group."""
    token, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel = part * BLOCK + tl.arange(0, BLOCK)
    hold_next()
    at = x + token.to(tl.int64) * x_stride + group * x_group_stride + channel
    value = tl.load(at, mask=channel < width, other=0.0)
    num_tokens = tl.num_programs(0)
    store_operand(
        *(value, codes, powers, group, token, num_tokens, part, width),
        *(TERMS, INPUT_BLOCK, SCALED),
    )


@triton.jit
def store_operand(
    value,
    codes,
    powers,
    group,
    token,
    num_tokens,
    part,
    width,
    TERMS: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Write a part of a token's group to an ``Operand``.

    Args:
        value: ``[n]`` bf16 from channel ``part n`` on, 0 behind the last; rounded to FP8 first if
            one code is to stand for it.
        codes: of the operand.
        powers: likewise.
        group: of the weight.
        token: whose value it is.
        num_tokens: of the operand.
        part: which of the parts.
        width: channels of a group.
        TERMS: codes for a value.
        INPUT_BLOCK: channels that share a scale where a value is rounded.
        SCALED: channels that share a scale.
    """
    BLOCK: tl.constexpr = value.shape[0]
    value = value.to(tl.float32)
    if TERMS == 1 and INPUT_BLOCK != SCALED:  # else the codes are what it is rounded to
        value = on_fp8_grid(value.reshape(1, BLOCK), INPUT_BLOCK).to(tl.float32)
    value = value.reshape(BLOCK // SCALED, SCALED)
    exponent = fp8_scale(absmax(value, 1))
    value = value * reciprocal_of_scale(exponent)[:, None]
    power = decode_ue8m0(exponent)
    channel = part * BLOCK + tl.arange(0, BLOCK)
    column = part * (BLOCK // SCALED) + tl.arange(0, BLOCK // SCALED)
    columns = tl.cdiv(width, SCALED)
    num_lines, line = num_tokens * TERMS, token * TERMS
    at_code = codes + (group * num_lines + line).to(tl.int64) * width + channel
    at_power = powers + (group * columns + column) * num_lines + line
    for term in tl.static_range(TERMS):
        code = encode_e4m3(value)
        tl.store(at_code + term * width, code.reshape(BLOCK), mask=channel < width)
        tl.store(at_power + term, power, mask=column < columns)
        # What is left has at most four bits: exact but for the smallest magnitudes of a block.
        value = (value - decode_e4m3(code)) * 16.0
        power *= 0.0625


@triton.jit(do_not_specialize=["num_tokens"])
def _stream(
    x_codes,
    x_powers,
    codes,
    scales,
    parts,
    num_tokens,
    num_rows,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
    TERMS: tl.constexpr,
    LINES: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A block of lines by a block of a group's rows, over one part of the input."""
    BLOCKS: tl.constexpr = BLOCK_K // SCALED
    COLUMNS: tl.constexpr = BLOCKS * LINES
    TOKENS: tl.constexpr = LINES // TERMS
    x_columns: tl.constexpr = (WIDTH + SCALED - 1) // SCALED
    tile_columns: tl.constexpr = (WIDTH + 31) // 32
    row_blocks = tl.cdiv(num_rows, BLOCK_N)
    tile_rows = tl.cdiv(num_rows, 32)
    group, row_block = tl.program_id(1) // row_blocks, tl.program_id(1) % row_blocks
    split = tl.program_id(2)
    row = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_K)
    column = tl.arange(0, COLUMNS)
    block, line = column // LINES, tl.program_id(0) * LINES + column % LINES
    num_lines = num_tokens * TERMS
    live = line < num_lines
    own = live[:, None] & (channel[None, :] // SCALED == block[:, None])

    stored_row = tl.minimum(row, num_rows - 1)
    at_code = codes + (group * num_rows + stored_row)[:, None].to(tl.int64) * WIDTH + channel
    at_x = x_codes + (group * num_lines + line)[:, None].to(tl.int64) * WIDTH + channel
    at_power = x_powers + group * x_columns * num_lines + line
    tile = tl.minimum(row_block * (BLOCK_N // 32) + tl.arange(0, BLOCK_N // 32), tile_rows - 1)
    at_scale = scales + (group * tile_rows + tile)[:, None] * tile_columns
    tile_column = tl.arange(0, BLOCKS)[None, :] * (SCALED // 32)
    hold_next()
    sums = tl.zeros((BLOCK_N // 32, 32, COLUMNS), tl.float32)
    # Scales are loaded one step ahead: these are too few for the pipeline that fetches the codes.
    first = split * STEPS * BLOCK_K
    exponents = tl.load(at_scale + tl.minimum(first // 32 + tile_column, tile_columns - 1))
    power_at = at_power + tl.minimum(first // SCALED + block, x_columns - 1) * num_lines
    power = tl.load(power_at, mask=live, other=0.0)
    for step in tl.range(0, STEPS):
        start = first + step * BLOCK_K
        if WIDTH % BLOCK_K == 0:
            code = tl.load(at_code + start)
            value = tl.load(at_x + start, mask=own, other=0.0)
        else:
            inside = start + channel < WIDTH
            code = tl.load(at_code + start, mask=inside, other=0.0)
            value = tl.load(at_x + start, mask=own & inside, other=0.0)
        # Tiles of larger scales hold zeros, or loading refuses them.
        scale = decode_ue8m0(tl.minimum(exponents, 154))
        factor = scale[:, :, None] * power.reshape(1, BLOCKS, LINES)
        following = start + BLOCK_K
        exponents = tl.load(at_scale + tl.minimum(following // 32 + tile_column, tile_columns - 1))
        power_at = at_power + tl.minimum(following // SCALED + block, x_columns - 1) * num_lines
        power = tl.load(power_at, mask=live, other=0.0)
        product = _dot_e4m3(code, value.T).reshape(BLOCK_N // 32, 32, COLUMNS)
        sums += product * factor.reshape(BLOCK_N // 32, 1, COLUMNS)
    sums = tl.sum(sums.reshape(BLOCK_N, BLOCKS, LINES), 1)
    sums = tl.sum(sums.reshape(BLOCK_N, TOKENS, TERMS), 2).T
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    at = ((split * num_tokens + token).to(tl.int64) * GROUPS + group)[:, None] * num_rows + row
    inside = (token < num_tokens)[:, None] & (row < num_rows)
    tl.store(parts + at, cast(sums, parts.dtype.element_ty), mask=inside)


@triton.jit
def _dot_e4m3(a, b):
    """E4M3 values ``[m, k]`` and ``[k, n]`` -> float32."""
    if not _NATIVE:
        a, b = decode_e4m3(a.to(tl.uint8, bitcast=True)), decode_e4m3(b.to(tl.uint8, bitcast=True))
    return tl.dot(a, b, input_precision="ieee")
