"""Number formats: E4M3, E2M1, UE8M0 and the block rules that combine them.

Encoders round to nearest even and take float32: a float64 input is rounded to float32 first, so
that chunkings which differ in the last bit of a float64 still give the same bytes (v41-model 11).
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_INFINITY = 0x7F800000  # as float32 bits: every exponent bit and no mantissa bit


def decode_ue8m0(exponents: Tensor) -> Tensor:
    """UE8M0 bytes -> float32 powers of two: byte e is 2^(e-127), 0 a subnormal, 255 NaN."""
    return _look_up(_ue8m0_table(exponents.device), exponents)


@functools.cache
def _ue8m0_table(device: torch.device) -> Tensor:
    values = [math.ldexp(1.0, e - 127) for e in range(255)] + [math.nan]
    return torch.tensor(values, dtype=torch.float64).float().to(device)


def _ceil_power_of_two(x: Tensor) -> Tensor:
    """What ``encode_ue8m0`` encodes; infinity for infinities and NaN."""
    bits = x.view(torch.int32).clamp(max=_INFINITY) + 0x7FFFFF  # carries unless the mantissa is 0
    return (bits & _INFINITY).view(torch.float32)


def encode_ue8m0(x: Tensor) -> Tensor:
    """The smallest power of two at or above positive normal float32 ``x``, as UE8M0 bytes.

    Infinities and NaN become 255, so that a broken row stays visibly broken.
    """
    return (_ceil_power_of_two(x).view(torch.int32) >> 23).to(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """E4M3 codes (uint8 or float8 dtype) -> float32."""
    return _look_up(_e4m3_table(codes.device), codes)


@functools.cache
def _e4m3_table(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


def encode_e4m3(x: Tensor) -> Tensor:
    """Float32, clamped to +-448, -> E4M3 codes as uint8."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e2m1(packed: Tensor) -> Tensor:
    """Packed pairs ``[..., n / 2]`` uint8 -> float32 ``[..., n]``; the low nibble comes first."""
    return _look_up(_e2m1_pairs(packed.device), packed).view(torch.float32)


@functools.cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """Both float32 of a byte as one int64 ``[256]``."""
    nibbles = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
    byte = torch.arange(256)
    pairs = torch.stack((nibbles[byte & 15], nibbles[byte >> 4]), dim=-1)
    return pairs.view(torch.int64).squeeze(-1).to(device)


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    """``table[codes]``, by the fastest way there is on a CPU."""
    return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def encode_e2m1(x: Tensor) -> Tensor:
    """Float32 ``[..., n]`` within +-6 -> packed pairs ``[..., n / 2]``; the sign of zero stays."""
    magnitude = torch.bucketize(x.abs(), _e2m1_borders(x.device), out_int32=True)
    code = (magnitude | (torch.signbit(x).int() << 3)).to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4)


@functools.cache
def _e2m1_borders(device: torch.device) -> Tensor:
    # bucketize counts the borders below x. A tie goes to the even code: down at .25, 1.25, 2.5 and
    # 5, up at .75, 1.75 and 3.5, whose borders are therefore moved one float down.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    down = torch.nextafter(ties, torch.zeros(7))
    return torch.where(torch.arange(7) % 2 == 1, down, ties).to(device)


def _over_scales(x: Tensor, block: int, *, floor: float, largest: float) -> tuple[Tensor, Tensor]:
    """Blocks ``[.., n / b, b]`` over their scales, and the scales, powers of two (4.2, 4.3)."""
    blocks = x.float().unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=floor)
    # Multiplied, not divided: the product's rounding decides the exponent (4.3).
    scales = _ceil_power_of_two(amax * (1 / largest))
    return blocks / scales, scales


def _over_fp8_scales(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return _over_scales(x, block, floor=1e-4, largest=E4M3_MAX)


def quantize_fp8_32(x: Tensor) -> tuple[Tensor, Tensor]:
    """FQ8_32 and MXFP8: E4M3 codes ``[..., n]`` and UE8M0 bytes ``[..., n / 32]`` (4.2, 7.3)."""
    return _quantize_fp8(x, 32)


def quantize_fp8_64(x: Tensor) -> tuple[Tensor, Tensor]:
    """FQ8_64: E4M3 codes ``[..., n]`` and UE8M0 bytes ``[..., n / 64]`` (v4-model 4.1)."""
    return _quantize_fp8(x, 64)


def _quantize_fp8(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    scaled, scales = _over_fp8_scales(x, block)
    return encode_e4m3(scaled).flatten(-2), encode_ue8m0(scales).squeeze(-1)


def store_fp8_32(x: Tensor, codes: Tensor, exponents: Tensor) -> None:
    """``quantize_fp8_32`` into tensors that are there."""
    for target, made in zip((codes, exponents), quantize_fp8_32(x), strict=True):
        target.copy_(made)


def dequantize_fp8_32(codes: Tensor, exponents: Tensor) -> Tensor:
    """Inverse of ``quantize_fp8_32``, float32; also rows of an Engram table."""
    return _dequantize_fp8(codes, exponents, 32)


def dequantize_fp8_64(codes: Tensor, exponents: Tensor) -> Tensor:
    """Inverse of ``quantize_fp8_64``, float32."""
    return _dequantize_fp8(codes, exponents, 64)


def _dequantize_fp8(codes: Tensor, exponents: Tensor, block: int) -> Tensor:
    scaled = decode_e4m3(codes).unflatten(-1, (-1, block)) * decode_ue8m0(exponents).unsqueeze(-1)
    return scaled.flatten(-2)


def quantize_fp4_16(x: Tensor) -> tuple[Tensor, Tensor]:
    """FQ4_16: packed pairs ``[..., n / 2]`` and E4M3 scale bytes ``[..., n / 16]`` (4.1)."""
    blocks = x.float().unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True)
    scales = encode_e4m3(amax.clamp(min=E2M1_MAX * 2.0**-9) / E2M1_MAX)
    scaled = blocks / decode_e4m3(scales)
    return encode_e2m1(scaled.clamp(-E2M1_MAX, E2M1_MAX).flatten(-2)), scales.squeeze(-1)


def dequantize_fp4_16(packed: Tensor, scales: Tensor) -> Tensor:
    """Inverse of ``quantize_fp4_16``, float32."""
    scaled = decode_e2m1(packed).unflatten(-1, (-1, 16)) * decode_e4m3(scales).unsqueeze(-1)
    return scaled.flatten(-2)


def quantize_fp4_32(x: Tensor) -> tuple[Tensor, Tensor]:
    """FQ4_32 (MXFP4): packed pairs ``[..., n / 2]`` and UE8M0 bytes ``[..., n / 32]`` (4.3)."""
    scaled, scales = _over_scales(x, 32, floor=E2M1_MAX * 2.0**-126, largest=E2M1_MAX)
    codes = encode_e2m1(scaled.clamp(-E2M1_MAX, E2M1_MAX).flatten(-2))
    return codes, encode_ue8m0(scales).squeeze(-1)


def dequantize_fp4_32(packed: Tensor, exponents: Tensor) -> Tensor:
    """Inverse of ``quantize_fp4_32``, float32; also MXFP4 weights ``[out, in / 2]`` (7.2)."""
    scaled = decode_e2m1(packed).unflatten(-1, (-1, 32)) * decode_ue8m0(exponents).unsqueeze(-1)
    return scaled.flatten(-2)


def dequantize_fp8_block(codes: Tensor, exponents: Tensor, *, block: int = 32) -> Tensor:
    """FP8 weight ``[out, in]`` with one UE8M0 byte per ``block`` x ``block`` tile -> float32.

    Edge tiles may be partial: ``exponents`` is ``[ceil(out / block), ceil(in / block)]``.
    """
    rows, columns = codes.shape[-2:]
    scale = decode_ue8m0(exponents).repeat_interleave(block, -2).repeat_interleave(block, -1)
    return decode_e4m3(codes) * scale[..., :rows, :columns]


def round_trip_fp8_32(x: Tensor) -> Tensor:
    """Quantise to MXFP8 and back, in the dtype of ``x`` (every such value is exact in bf16)."""
    return round_trip_fp8(x, 32)


def round_trip_fp8(x: Tensor, block: int) -> Tensor:
    """Rows ``[..., n]`` to E4M3 and back, as products take their input (7.3 of both models).

    Args:
        x: of any dtype, which the result has too: every such value is exact in bf16.
        block: channels that share a power of two; the last block of a row may be partial.
    """
    width = x.shape[-1]
    scaled, scales = _over_fp8_scales(pad(x, (0, -width % block)), block)
    rounded = decode_e4m3(encode_e4m3(scaled)) * scales
    return rounded.flatten(-2)[..., :width].to(x.dtype)


def round_trip_fp8_row(x: Tensor) -> Tensor:
    """Rows ``[..., n]`` to E4M3 with one power of two each and back, in the dtype of ``x``.

    The same as ``round_trip_fp8_32`` wherever a value is at least 2^-6 of its row's power P, for a
    floating point grid does not depend on a power of two. Smaller values fall on multiples of
    2^-9 P, which moves them by 2^-10 P at most. As the largest channel is above 224 P (if above
    1e-4), a row moves by less than sqrt(n) 2^-10 / 224 of its length: 3.1e-4 for n = 5120, whatever
    is in it, where three bits of mantissa cost 2.6e-2.
    """
    return round_trip_fp8(x, x.shape[-1])


def round_trip_fp4_32(x: Tensor) -> Tensor:
    """Quantise to MXFP4 and back, in the dtype of ``x``."""
    return dequantize_fp4_32(*quantize_fp4_32(x)).to(x.dtype)
