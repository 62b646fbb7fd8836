"""MXFP4 values as operands of FP8 tensor cores, exactly (kernels.md 0.5, fact 2).

E2M1 times 2^s is a normal E5M2 value for -13 <= s <= 13. A row whose block scales lie within 26
octaves is therefore one E5M2 row and one power of two; E4M3 would span 14 octaves, and have
subnormals to take care of. What lies further below the largest scale of its row is made larger, to
2^-26 of it at most.

NVIDIA only, from sm_89 on: the expansion is PTX.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leadline.kernels.triton.formats import absmax, decode_ue8m0

# Eight nibbles in a word pick their magnitudes' codes from two words of four. A byte permutation
# takes the low three bits of a nibble as a place; where the fourth bit is set it spreads the sign
# of the byte there. Of the first byte, a negative zero, that makes 0xFF instead of 0x80: so the
# sign of a nibble lands in bit 6.
_EXPAND = tl.constexpr("""
{
    .reg .b32 places, signs, magnitude, sign;
    and.b32 places, $2, 0x77777777;
    and.b32 signs, $2, 0x88888888;
    prmt.b32 magnitude, $3, $7, places;
    prmt.b32 sign, $3, $7, signs;
    shl.b32 sign, sign, 1;
    lop3.b32 $0, sign, 0x80808080, magnitude, 0xEA;
    shr.u32 places, places, 16;
    shr.u32 signs, signs, 16;
    prmt.b32 magnitude, $3, $7, places;
    prmt.b32 sign, $3, $7, signs;
    shl.b32 sign, sign, 1;
    lop3.b32 $1, sign, 0x80808080, magnitude, 0xEA;
}
""")

_ROUND = tl.constexpr("""
{
    .reg .b32 pair;
    cvt.rn.bf16x2.f32 pair, $3, $2;
    shl.b32 $0, pair, 16;
    and.b32 $1, pair, 0xFFFF0000;
}
""")


@triton.jit
def split_channels(HALF: tl.constexpr):
    """Channels of the first operand of ``expand_rows``; the second holds those four further on.

    A product does not mind the order of its terms. In this one the sixteen bytes that a thread
    loads are what the tensor cores want of it, and belong to one block.
    """
    BLOCKS: tl.constexpr = HALF // 16
    place = tl.arange(0, HALF)
    word, block, byte = place // (4 * BLOCKS), place // 4 % BLOCKS, place % 4
    return block * 32 + word * 8 + byte


@triton.jit
def expand_rows(codes, exponents):
    """Packed rows as two operands, which hold the channels of ``split_channels``.

    Args:
        codes: ``[rows, n / 2]`` uint8 pairs of E2M1.
        exponents: ``[rows, n / 32]`` UE8M0 bytes.

    Returns:
        Two ``[rows, n / 2]`` float8e5 and the power of two ``[rows]`` float32 of each row, NaN
        where a scale is NaN.
    """
    ROWS: tl.constexpr = codes.shape[0]
    BLOCKS: tl.constexpr = exponents.shape[1]
    e = exponents.to(tl.int32)
    largest = tl.max(e, axis=1)
    octaves = tl.maximum(e - largest[:, None] + 26, 0)[:, :, None]
    # The E5M2 codes of -0, 0.5, 1, 1.5 and of 2, 3, 4, 6, times a power of two.
    small = octaves * 0x04040400 + 0x0A080480
    large = octaves * 0x04040404 + 0x12100E0C
    low, high = tl.inline_asm_elementwise(
        _EXPAND,
        "=r,=r,r,r,r,r,r,r,r,r,r",
        [codes.reshape(ROWS, BLOCKS, 16), small, large],
        dtype=(tl.uint8, tl.uint8),
        is_pure=True,
        pack=4,
    )
    low = low.reshape(ROWS, BLOCKS, 4, 4).permute(0, 2, 1, 3).reshape(ROWS, 16 * BLOCKS)
    high = high.reshape(ROWS, BLOCKS, 4, 4).permute(0, 2, 1, 3).reshape(ROWS, 16 * BLOCKS)
    power = decode_ue8m0(largest) * 0.0001220703125  # 2^-13
    return low.to(tl.float8e5, bitcast=True), high.to(tl.float8e5, bitcast=True), power


@triton.jit
def fold_rows(low, high):
    """Rows of MXFP4 values ``[rows, n / 2]`` twice, float32, as operands and powers of two."""
    amax = tl.maximum(absmax(low, 1), absmax(high, 1))
    exponent = tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 16)
    up = ((269 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]  # amax to [2^15, 2^16)
    power = ((exponent - 15) << 23).to(tl.float32, bitcast=True)
    return (low * up).to(tl.float8e5), (high * up).to(tl.float8e5), power


@triton.jit
def round_bf16(x):
    """Float32 -> the nearest bf16, as float32; a scalar conversion would be four times slower."""
    return tl.inline_asm_elementwise(
        _ROUND, "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2
    )
