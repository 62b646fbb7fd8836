"""MXFP4 weights, and rows of activations, as operands of FP8 tensor cores (kernels.md 0.5, 10.3).

As index keys in ``fp8_operands``, weights are E5M2 and a power of two for each row of a tile, which
is exact. Tensor cores multiply E5M2 by E4M3 as fast as two of a kind, so activations are E4M3, of
which they need the third bit of the mantissa.

NVIDIA only, from sm_89 on: the expansion is PTX.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.triton.formats import (
    absmax,
    decode_e2m1,
    decode_ue8m0,
    encode_e4m3,
    fp8_scale,
    reciprocal_of_scale,
)
from leadline.kernels.triton.launch import INTERPRETED

SPAN = 128
"""Channels of a tile of ``expand_tile``, whose order ``quantize_rows`` gives its codes."""

# Powers of weights are 2^-22 of what they are, and those of activations, which are 2^-22 at least,
# make up for it: so no sum on the way overflows unless the true one does, whatever the scales.
_LIFT = tl.constexpr(22)

_PTX = tl.constexpr(not INTERPRETED)

# Eight nibbles in a word pick their magnitudes' codes from two words of four: a byte permutation
# takes the low three bits of a nibble as a place. The signs of the upper nibbles are the top bits
# of their bytes, those of the lower ones are once the word is shifted by four; another permutation
# brings both in the nibbles' order.
_EXPAND = tl.constexpr("""
{
    .reg .b32 places, shifted, magnitude, sign;
    and.b32 places, $2, 0x77777777;
    shl.b32 shifted, $2, 4;
    prmt.b32 magnitude, $3, $7, places;
    prmt.b32 sign, shifted, $2, 0x5140;
    lop3.b32 $0, sign, 0x80808080, magnitude, 0xEA;
    shr.u32 places, places, 16;
    prmt.b32 magnitude, $3, $7, places;
    prmt.b32 sign, shifted, $2, 0x7362;
    lop3.b32 $1, sign, 0x80808080, magnitude, 0xEA;
}
""")


@triton.jit
def expand_tile(codes, words):
    """A tile of packed rows as one operand, for products with codes of ``quantize_rows``.

    Where a warp has 16 of the rows, each thread makes of the bytes that it loads what the tensor
    cores want of it. That is why rows change places: ``in_order`` puts those of a product back.

    Args:
        codes: ``[rows, 64]`` uint8 pairs of E2M1; rows a multiple of 16.
        words: ``[rows]`` int32, a row's four UE8M0 bytes, the first one lowest.

    Returns:
        ``[rows, SPAN]`` float8e5, and the powers of two ``[rows]`` float32 of the rows, lowered
        by ``_LIFT`` octaves; NaN where a scale is NaN.
    """
    ROWS: tl.constexpr = codes.shape[0]
    first, second = words & 0xFF, (words >> 8) & 0xFF
    third, fourth = (words >> 16) & 0xFF, (words >> 24) & 0xFF
    largest = tl.maximum(tl.maximum(first, second), tl.maximum(third, fourth))
    exponents = (words[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 0xFF
    low, high = _expand(codes, exponents - largest[:, None])
    tile = tl.join(low, high).reshape(2, ROWS // 16, 8, 4, 4, 4, 2)
    tile = tile.permute(1, 0, 2, 6, 4, 3, 5).reshape(ROWS, 128)
    # Written as a float's exponent, at which blocks of no weight above 2^-89 count as zeros.
    bits = tl.maximum(largest - (13 + _LIFT), 0) << 23
    bits = tl.where(largest == 255, 0x7FC00000, bits)
    power = bits.to(tl.float32, bitcast=True)
    power = power.reshape(2, ROWS // 16, 8).permute(1, 0, 2).reshape(ROWS)
    return tile.to(tl.float8e5, bitcast=True), power


@triton.jit
def in_order(product):
    """``[rows, n]`` of a product with ``expand_tile``'s operand, rows as they were loaded."""
    ROWS: tl.constexpr = product.shape[0]
    N: tl.constexpr = product.shape[1]
    return product.reshape(ROWS // 16, 2, 8, N).permute(1, 0, 2, 3).reshape(ROWS, N)


@triton.jit
def _expand(codes, octaves):
    """Codes ``[rows, n / 2]`` times powers of two ``[rows, n / 32]``, at most 1, and 2^13.

    Returns:
        E5M2 codes ``[rows, n / 32, 16]`` twice: the first and the last four of each eight channels.
    """
    ROWS: tl.constexpr = codes.shape[0]
    BLOCKS: tl.constexpr = octaves.shape[1]
    octaves = tl.maximum(octaves + 26, 0)[:, :, None]
    if not _PTX:
        eights = codes.reshape(ROWS, BLOCKS, 4, 4, 1).to(tl.int32)
        nibbles = (eights >> (4 * tl.arange(0, 2))).reshape(ROWS, BLOCKS, 4, 2, 4)
        value = decode_e2m1(nibbles) * decode_ue8m0(octaves + 114)[:, :, :, None, None]
        # An E5M2 value is the upper half of the same in float16.
        code = (value.to(tl.float16).to(tl.int16, bitcast=True) >> 8).to(tl.uint8)
        low, high = tl.split(code.permute(0, 1, 2, 4, 3))
        return low.reshape(ROWS, BLOCKS, 16), high.reshape(ROWS, BLOCKS, 16)
    # The E5M2 codes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, times a power of two.
    small = octaves * 0x04040400 + 0x0A080400
    large = octaves * 0x04040404 + 0x12100E0C
    return tl.inline_asm_elementwise(
        _EXPAND,
        "=&r,=&r,r,r,r,r,r,r,r,r,r",  # the first is written before the last look at the inputs
        [codes.reshape(ROWS, BLOCKS, 16), small, large],
        dtype=(tl.uint8, tl.uint8),
        is_pure=True,
        pack=4,
    )


def quantize_rows(x: Tensor, used: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows as E4M3 and one power of two each (``reference.quant.round_trip_fp8_row``).

    Args:
        x: ``[n, width]`` bf16, n at least 1, rows contiguous.
        used: ``[n]`` int32; rows where it is negative are neither read nor written.

    Returns:
        Codes ``[n, SPAN ceil(width / SPAN)]`` float8_e4m3fn, in the order of ``expand_tile`` within
        each SPAN, zero beyond the width; powers ``[n]`` float32, raised by ``_LIFT`` octaves, NaN
        where a row is not finite, infinite where they pass a float's range.
    """
    num_rows, width = x.shape
    padded = triton.cdiv(width, SPAN) * SPAN
    codes = torch.empty(num_rows, padded, dtype=torch.uint8, device=x.device)
    powers = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(padded)
    num_warps = max(1, min(block // 512, 8))
    _quantize_rows[(num_rows,)](
        *(x, x.stride(0), used, codes, powers, width, padded),
        SPAN=SPAN,
        BLOCK=block,
        num_warps=num_warps,
    )
    return codes.view(torch.float8_e4m3fn), powers


@triton.jit
def _quantize_rows(
    x, stride, used, codes, powers, width, padded, SPAN: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if used is not None:  # noqa: SIM102 - compiled only where there are any
        if tl.load(used + row) < 0:
            return
    channel = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + channel, mask=channel < width, other=0.0).to(tl.float32)
    scale = fp8_scale(absmax(value, 0))
    code = encode_e4m3(value * reciprocal_of_scale(scale))
    # Span, block, word, half of a word, nibble -> the order in which a thread meets them.
    code = code.reshape(BLOCK // SPAN, 4, 4, 2, 4).permute(0, 3, 2, 1, 4).reshape(BLOCK)
    tl.store(codes + row * padded + channel, code, mask=channel < padded)
    power = tl.where(scale == 255, 0x7FC00000, tl.minimum(scale + _LIFT, 255) << 23)
    tl.store(powers + row, power.to(tl.float32, bitcast=True))
