"""Activations in FP8: what packed products make of their input (7.3 of both models)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.triton.formats import (
    absmax,
    encode_e4m3,
    fp8_scale,
    reciprocal_of_scale,
    round_trip_e4m3,
    to_bf16,
)
from leadline.kernels.triton.launch import hold_next, overlapped

_BLOCK = 2048


def round_trip_fp8(x: Tensor, block: int) -> Tensor:
    """bf16 ``[..., n]`` -> the same shape, contiguous; ``block`` channels share a scale."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        width = x.shape[-1]
        whole = triton.cdiv(width, block) * block
        size = x.numel() // width * whole
        _round_trip[(triton.cdiv(size, _BLOCK),)](
            x, out, size, width, whole, width == whole, block, _BLOCK, num_warps=4, **overlapped()
        )
    return out


@triton.jit
def _round_trip(
    x, out, size, width, whole, EVEN: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    """Some channels of rows that are ``whole`` blocks wide, or end ``width`` channels on."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    if not EVEN:
        channel = at % whole
        inside &= channel < width
        at = at // whole * width + channel
    hold_next()
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    rounded = on_fp8_grid(value.reshape(1, BLOCK), SCALED)
    tl.store(out + at, rounded.reshape(BLOCK), mask=inside)


@triton.jit
def on_fp8_grid(x, SCALED: tl.constexpr):
    """Float32 ``[rows, n]`` -> bf16, blocks of so many along n quantised to E4M3 and back: exact.

    NaN and infinity make their own block NaN.
    """
    return to_bf16(nearest_fp8(x, SCALED))


@triton.jit
def nearest_fp8(x, SCALED: tl.constexpr):
    """``on_fp8_grid`` in float32."""
    rows: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    blocks = x.reshape(rows, width // SCALED, SCALED)
    blocks = round_trip_e4m3(blocks, fp8_scale(absmax(blocks, 2))[:, :, None])
    return blocks.reshape(rows, width)


@triton.jit
def store_fp8_32(x, codes, exponents, first, inside):
    """Write rows of bf16 values as ``reference.quant.quantize_fp8_32`` encodes them.

    Args:
        x: ``[rows, n]`` bf16.
        codes: a contiguous tensor of channels.
        exponents: of its blocks.
        first: ``[rows]`` int64 places of the rows' first channels, multiples of 32.
        inside: ``[rows, n / 32]``, blocks that are written.
    """
    ROWS: tl.constexpr = x.shape[0]
    BLOCKS: tl.constexpr = x.shape[1] // 32
    values = x.to(tl.float32).reshape(ROWS, BLOCKS, 32)
    exponent = fp8_scale(absmax(values, 2))
    code = encode_e4m3(values * reciprocal_of_scale(exponent)[:, :, None])
    block = first[:, None] // 32 + tl.arange(0, BLOCKS)
    tl.store(exponents + block, exponent.to(tl.uint8), mask=inside)
    at = block[:, :, None] * 32 + tl.arange(0, 32)
    tl.store(codes + at, code, mask=inside[:, :, None])
