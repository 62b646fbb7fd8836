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

from leadline.kernels.triton.formats import absmax

# Eight nibbles in a word pick their magnitudes' codes from two words of four: a byte permutation
# takes the low three bits of a nibble as a place. Where the fourth bit is set it spreads the sign
# of the byte there: of bytes 0x40 that makes 0, so twice the outcome is a sign bit for what is NOT
# negative. Codes of the opposite sign save the instruction that would turn it round; the other
# operand has the opposite sign too.
_EXPAND = tl.constexpr("""
{
    .reg .b32 upper, places, magnitude, sign, half;
    mov.b32 half, 0x40404040;
    shr.u32 upper, $2, 16;
    and.b32 places, $2, 0x7777;
    prmt.b32 magnitude, $3, $7, places;
    prmt.b32 sign, half, half, $2;
    mad.lo.u32 $0, sign, 2, magnitude;
    and.b32 places, upper, 0x7777;
    prmt.b32 magnitude, $3, $7, places;
    prmt.b32 sign, half, half, upper;
    mad.lo.u32 $1, sign, 2, magnitude;
}
""")

# The relu and both roundings of two products at once; a sum with -0 changes nothing.
_RELU_PRODUCT = tl.constexpr("""
{
    .reg .b32 pair, zero;
    mov.b32 zero, 0x80008000;
    cvt.rn.relu.bf16x2.f32 pair, $3, $2;
    fma.rn.bf16x2 pair, pair, $4, zero;
    shl.b32 $0, pair, 16;
    and.b32 $1, pair, 0xFFFF0000;
}
""")


@triton.jit
def split_channels(DIM: tl.constexpr):
    """Which channel lies where in the operands.

    A product does not mind the order of its terms. In this one the sixteen bytes that a thread
    loads are what the tensor cores want of it, and belong to one block.
    """
    BLOCKS: tl.constexpr = DIM // 32
    place = tl.arange(0, DIM)
    return place // 4 % BLOCKS * 32 + place // (4 * BLOCKS) * 4 + place % 4


@triton.jit
def expand_rows(codes, exponents):
    """Packed rows as an operand, negated, which holds the channels of ``split_channels``.

    Args:
        codes: ``[rows, n / 2]`` uint8 pairs of E2M1.
        exponents: ``[rows, n / 32]`` UE8M0 bytes.

    Returns:
        ``[rows, n]`` float8e5, and the UE8M0 byte of the
        largest block of each row, int32, in units of 2^-13.
    """
    ROWS: tl.constexpr = codes.shape[0]
    BLOCKS: tl.constexpr = exponents.shape[1]
    e = exponents.to(tl.int32)
    # Not pure: the compiler would find the maximum a second time for another layout.
    largest = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [tl.max(e, axis=1)], dtype=tl.int32, is_pure=False, pack=1
    )
    octaves = tl.maximum(e - largest[:, None] + 26, 0)[:, :, None]
    # The E5M2 codes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, times a power of two.
    small = octaves * 0x04040400 + 0x0A080400
    large = octaves * 0x04040404 + 0x12100E0C
    low, high = tl.inline_asm_elementwise(
        _EXPAND,
        "=r,=r,r,r,r,r,r,r,r,r,r",
        [codes.reshape(ROWS, BLOCKS, 16), small, large],
        dtype=(tl.uint8, tl.uint8),
        is_pure=True,
        pack=4,
    )
    both = tl.join(low, high).reshape(ROWS, BLOCKS, 4, 4, 2).permute(0, 2, 4, 1, 3)
    return both.reshape(ROWS, 32 * BLOCKS).to(tl.float8e5, bitcast=True), largest


@triton.jit
def fold_rows(x):
    """Rows of MXFP4 values, float32, as an operand, negated, and the power of two of each row."""
    exponent = tl.maximum(absmax(x, 1).to(tl.int32, bitcast=True) >> 23, 16)
    up = ((269 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]  # amax to [2^15, 2^16)
    power = ((exponent - 15) << 23).to(tl.float32, bitcast=True)
    # E5M2 is the upper half of float16, which has these values. A cast lost codes where several are
    # the same, as are the zeros of heads that do not exist: see ``formats.ENCODE_E4M3``.
    codes = (x * -up).to(tl.float16).to(tl.int16, bitcast=True) >> 8
    return codes.to(tl.int8).to(tl.float8e5, bitcast=True), power


@triton.jit
def relu_product(dot, weight):
    """``bf16(relu(bf16(dot)) * weight)`` as float32, of a bf16 weight."""
    return tl.inline_asm_elementwise(
        _RELU_PRODUCT,
        "=f,=f,f,f,r",
        [dot, weight],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )
