"""Number formats inside kernels, equal to ``reference.quant`` bit for bit (kernels.md 0.2, 0.5).

GPUs before Blackwell have no E2M1 conversions, so these are integer operations. E4M3 (on NVIDIA's
GPUs from sm_89 on) and bf16 are cast by the hardware, and by integers elsewhere. Casts of Triton's
interpreter do not round to nearest: never cast to these formats by ``.to`` or by a store.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from leadline.kernels.triton.launch import NATIVE_CASTS

_INVERSE_448 = tl.constexpr(1 / 448)
_INVERSE_6 = tl.constexpr(1 / 6)
_FLOOR_FP8 = tl.constexpr(1e-4)
_FLOOR_FP4 = tl.constexpr(6 * 2.0**-126)

# Four values at a time, and not by ``.to``: where codes of one conversion meet codes of another in
# a register and are used by themselves too, ptxas 12.8 merges the conversions and forgets the
# second use, which then reads the stack pointer. Here a pair of codes has one use.
ENCODE_E4M3 = tl.constexpr("""
{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}
""")


@triton.jit
def ceil_power_of_two(x):
    """UE8M0 byte (int32) of the smallest power of two at or above positive float32 ``x``.

    Infinities and NaN become 255.
    """
    bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7F800000) + 0x7FFFFF
    return (bits >> 23) & 0xFF


@triton.jit
def decode_ue8m0(exponents):
    """UE8M0 bytes (any integer type) -> float32; byte 0 is the subnormal 2^-127, 255 is NaN."""
    e = exponents.to(tl.int32)
    bits = tl.where(e == 0, 0x00400000, e << 23)
    return tl.where(e == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal_of_scale(exponents):
    """``1 / decode_ue8m0(e)``, exact for 1 <= e <= 253; NaN for 255. Scales of quantisers."""
    e = exponents.to(tl.int32)
    bits = tl.where(e == 255, 0x7FC00000, (254 - e) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_e4m3(codes):
    """E4M3 codes (uint8) -> float32, exactly; the NaN code gives 480, so scales must carry NaN."""
    c = codes.to(tl.int32)
    bits = ((c & 0x80) << 24) | ((c & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120, the exponents' bias


@triton.jit
def encode_e4m3(x):
    """Float32 -> E4M3 codes (uint8), clamped to +-448, to nearest even; NaN becomes a NaN code."""
    if NATIVE_CASTS and cuda_capability_geq(8, 9):
        return tl.inline_asm_elementwise(
            ENCODE_E4M3, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4
        )
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal codes: round the mantissa to 3 bits; the carry runs into the exponent.
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9: adding 2^14 rounds to them.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    code = tl.minimum(code, 0x7E)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def round_trip_e4m3(x, exponents):
    """Float32 in units of ``2^(e - 127)`` to E4M3 and back; NaN where the byte is 255."""
    codes = encode_e4m3(x * reciprocal_of_scale(exponents))
    return decode_e4m3(codes) * decode_ue8m0(exponents)


@triton.jit
def to_bf16(x):
    """Float32 -> bf16, to nearest even; NaN stays NaN."""
    if NATIVE_CASTS:
        return x.to(tl.bfloat16)
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
    return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Float32 -> the element type of an output, bf16 to nearest even."""
    if dtype == tl.bfloat16:
        return to_bf16(x)
    return x.to(dtype)


@triton.jit
def dot_bf16(a, b, sums):
    """``sums + a b`` of bf16 operands, added in float32."""
    if NATIVE_CASTS:
        return tl.dot(a, b, sums)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")


@triton.jit
def decode_e2m1(nibbles):
    """E2M1 codes (integers, the low four bits count) -> float32."""
    n = nibbles.to(tl.int32)
    bits = ((n & 8) << 28) | ((n & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def encode_e2m1(x):
    """Float32 -> E2M1 codes (int32), to nearest even, clamped to +-6; the sign of zero stays."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 6.0)
    # From 1 on: round the mantissa to one bit. Below: multiples of a half, by adding 2^22.
    m = magnitude.to(tl.int32, bitcast=True)
    normal = ((m + 0x1FFFFF + ((m >> 22) & 1)) >> 22) - (126 << 1)
    subnormal = (magnitude + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    return tl.where(m < 0x3F800000, subnormal, normal) | ((bits >> 28) & 8)


@triton.jit
def fp8_scale(amax):
    """UE8M0 byte (int32) of an E4M3 block with this largest magnitude (v41-model 4.2)."""
    return ceil_power_of_two(_at_least(amax, _FLOOR_FP8) * _INVERSE_448)


@triton.jit
def fp4_32_scale(amax):
    """UE8M0 byte (int32) of a block of 32 in MXFP4 (v41-model 4.3)."""
    return ceil_power_of_two(_at_least(amax, _FLOOR_FP4) * _INVERSE_6)


@triton.jit
def fp4_16_scale(amax):
    """E4M3 code (uint8) of a block of 16 (v41-model 4.1); divide by ``decode_e4m3`` of it."""
    return encode_e4m3(tl.div_rn(_at_least(amax, 0.01171875), 6.0))  # 6 * 2^-9


@triton.jit
def _at_least(x, floor):
    """NaN stays NaN: a broken row stays visibly broken."""
    return tl.maximum(x, floor, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def absmax(x, axis: tl.constexpr):
    """Largest magnitude along an axis; NaN where there is one: its bits are above all others."""
    magnitudes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(magnitudes, axis).to(tl.float32, bitcast=True)


@triton.jit
def round_e2m1(x):
    """Float32 -> the nearest E2M1 value, as ``decode_e2m1(encode_e2m1(x))``; NaN stays NaN.

    Not to be compiled with fused or reordered sums.
    """
    x = tl.clamp(x, -6.0, 6.0, propagate_nan=tl.PropagateNan.ALL)
    octave = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)  # from 1 on
    # Half of that is the distance of values, and of float32 numbers around this one.
    big = (octave + (22 << 23) + (1 << 22)).to(tl.float32, bitcast=True)
    return (x + big) - big
