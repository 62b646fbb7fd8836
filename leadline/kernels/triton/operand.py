"""Tokens as the E4M3 codes that FP8 tensor cores multiply with weights (kernels.md 9 and 11).

A value has one code, that to which the product rounds its input, or two, the second for what the
first one leaves. Aligned weights meet blocks of 128 channels that share a scale, others of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.packed import PackedWeight
from leadline.kernels.triton.formats import (
    absmax,
    decode_e4m3,
    decode_ue8m0,
    encode_e4m3,
    fp8_scale,
    reciprocal_of_scale,
)
from leadline.kernels.triton.launch import NATIVE_CASTS, hold_next, overlapped
from leadline.kernels.triton.quant import nearest_fp8

_TERM = tl.constexpr(1 / 16)
_BLOCK = 512


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
        terms, scaled = encoding_for(weight)
        groups, _, width = weight.codes.shape
        lines = tokens * terms
        codes = weight.codes.new_empty(groups, lines, width)
        powers = codes.new_empty(groups, triton.cdiv(width, scaled), lines, dtype=torch.float32)
        return Operand(codes, powers, terms, scaled, weight.input_block)


def encoding_for(weight: PackedWeight) -> tuple[int, int]:
    """Codes for a value of the input, and channels of it that share a scale."""
    return 1 if weight.quantizes_input else 2, 128 if weight.aligned else 32


def encode(x: Tensor, weight: PackedWeight) -> Operand:
    """bf16 ``[m, G, in]``, adjacent channels, rounded to FP8 if the weight wants that."""
    tokens, groups, width = x.shape
    operand = Operand.empty(tokens, weight)
    _encode_tokens[(tokens, groups, triton.cdiv(width, _BLOCK))](
        x,
        operand.codes,
        operand.powers,
        x.stride(0),
        x.stride(1),
        width,
        TERMS=operand.terms,
        INPUT_BLOCK=operand.input_block,
        SCALED=operand.scaled,
        BLOCK=_BLOCK,
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
        value: ``[n]`` bf16 from channel ``part n`` on, 0 behind the last.
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
    value, power = _scaled(value.reshape(1, BLOCK), TERMS, INPUT_BLOCK, SCALED)
    channel = part * BLOCK + tl.arange(0, BLOCK)
    column = part * (BLOCK // SCALED) + tl.arange(0, BLOCK // SCALED)
    columns = tl.cdiv(width, SCALED)
    num_lines, line = num_tokens * TERMS, token * TERMS
    at_code = codes + (group * num_lines + line).to(tl.int64) * width + channel
    at_power = powers + (group * columns + column) * num_lines + line
    for term in tl.static_range(TERMS):
        code, rest = _next_term(value)
        tl.store(at_code + term * width, code.reshape(BLOCK), mask=channel < width)
        tl.store(at_power + term, power.reshape(BLOCK // SCALED), mask=column < columns)
        value, power = rest, power * _TERM


@triton.jit
def _scaled(value, TERMS: tl.constexpr, INPUT_BLOCK: tl.constexpr, SCALED: tl.constexpr):
    """bf16 ``[tokens, n]`` -> ``[tokens, n / SCALED, SCALED]`` in units of the blocks' powers.

    Rounded to FP8 first if one code is to stand for a value.
    """
    TOKENS: tl.constexpr = value.shape[0]
    BLOCKS: tl.constexpr = value.shape[1] // SCALED
    value = value.to(tl.float32)
    if TERMS == 1 and INPUT_BLOCK != SCALED:  # else the codes are what it is rounded to
        value = nearest_fp8(value, INPUT_BLOCK)
    value = value.reshape(TOKENS, BLOCKS, SCALED)
    exponent = fp8_scale(absmax(value, 2))
    return value * reciprocal_of_scale(exponent)[:, :, None], decode_ue8m0(exponent)


@triton.jit
def _next_term(value):
    """Codes, and what they leave in units of ``_TERM``.

    That has at most four bits: exact but for the smallest magnitudes of a block.
    """
    code = encode_e4m3(value)
    return code, (value - decode_e4m3(code)) * (1 / _TERM)


@triton.jit
def encode_columns(
    value,
    LINES: tl.constexpr,
    TERMS: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
):
    """A step's right side of a product, without an ``Operand`` in memory.

    Args:
        value: ``[tokens, n]`` bf16.
        LINES: codes' lines, ``TERMS`` for each token; if there are more, tokens are repeated.
        TERMS: as of ``store_operand``.
        INPUT_BLOCK: likewise.
        SCALED: likewise.

    Returns:
        codes: ``[n / SCALED LINES, n]`` E4M3: all lines for each block, zeros in other blocks.
        powers: ``[n / SCALED LINES]`` float32.
    """
    TOKENS: tl.constexpr = value.shape[0]
    WIDTH: tl.constexpr = value.shape[1]
    BLOCKS: tl.constexpr = WIDTH // SCALED
    COLUMNS: tl.constexpr = BLOCKS * LINES
    REPEATS: tl.constexpr = LINES // (TOKENS * TERMS)
    value, power = _scaled(value, TERMS, INPUT_BLOCK, SCALED)
    code, rest = _next_term(value)
    if TERMS == 2:
        code = tl.join(code, _next_term(rest)[0]).permute(0, 3, 1, 2)
        power = tl.join(power, power * _TERM).permute(1, 0, 2)
    else:
        power = power.T
    code = code.reshape(1, 1, TOKENS * TERMS, WIDTH)
    code = tl.broadcast_to(code, (BLOCKS, REPEATS, TOKENS * TERMS, WIDTH)).reshape(COLUMNS, WIDTH)
    power = power.reshape(BLOCKS, 1, TOKENS * TERMS)
    power = tl.broadcast_to(power, (BLOCKS, REPEATS, TOKENS * TERMS)).reshape(COLUMNS)
    block = tl.arange(0, COLUMNS)[:, None] // LINES
    code = _codes_where(tl.arange(0, WIDTH)[None, :] // SCALED == block, code)
    return code.to(tl.float8e4nv, bitcast=True), power


@triton.jit
def _codes_where(mask, codes):
    """Codes (uint8) or zeros, four at a time.

    Chosen one by one, they would be taken out of their registers and put back.
    """
    if not NATIVE_CASTS:
        return tl.where(mask, codes, 0)
    kept = tl.where(mask, 0xFF, 0).to(tl.uint8)
    return tl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [codes, kept], dtype=tl.uint8, is_pure=True, pack=4
    )
