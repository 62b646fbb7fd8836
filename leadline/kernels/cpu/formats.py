"""Number formats inside kernels: single values, rows and blocks, bit for bit as ``reference.quant``
has them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from leadline.kernels.cpu.jit import F1, F2, F3, U1, Packed, Real, Whole, inline, splice
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import quant

# Records as kernels tell them apart.
FP8_32, FP4_16, FP4_32, FP8_64, BFLOAT16, FLOAT32 = range(6)
CODE_OF = {
    Record.FP8_32: FP8_32,
    Record.FP4_16: FP4_16,
    Record.FP4_32: FP4_32,
    Record.FP8_64: FP8_64,
    Record.BFLOAT16: BFLOAT16,
    Record.FLOAT32: FLOAT32,
}

_bytes = torch.arange(256, dtype=torch.uint8)
_E4M3 = quant.decode_e4m3(_bytes).numpy()
_UE8M0 = quant.decode_ue8m0(_bytes).numpy()
_E2M1 = np.array([*quant.E2M1_VALUES, *(-v for v in quant.E2M1_VALUES)], dtype=np.float32)

_INFINITY = 0x7F800000
_E4M3_FLOOR, _FP4_FLOOR = np.float32(1e-4), np.float32(6.0 * 2.0**-126)
_BY_E4M3_MAX, _BY_E2M1_MAX = np.float32(1 / 448.0), np.float32(1 / 6.0)
_E4M3_MAX, _E2M1_MAX = np.float32(448.0), np.float32(6.0)
_FP4_16_FLOOR = np.float32(6.0 * 2.0**-9)


_NO_FLOATS = np.empty((0, 1, 0), np.float32)


def bytes_of(field: RecordField) -> tuple[NDArray[Any], NDArray[Any], int]:
    """What kernels write rows of a field by: values, scales and the code of its record.

    Both are bytes; plain records have no scales.
    """
    values = field.values.view(torch.uint8)
    scales = values[..., :0] if field.scales is None else field.scales
    return values.numpy(), scales.numpy(), CODE_OF[field.record]


def pages_of(field: RecordField) -> tuple[NDArray[Any], NDArray[Any], int, NDArray[Any]]:
    """What ``load_row`` reads rows of a field by: ``bytes_of``, and float32 where it holds that."""
    is_float32 = field.record is Record.FLOAT32
    return *bytes_of(field), field.values.numpy() if is_float32 else _NO_FLOATS


@inline
def bits_of(x: Real) -> Whole:
    """A float32 as an integer."""
    return np.float32(x).view(np.int32)


@inline
def from_bits(bits: Whole) -> Real:
    """The inverse of ``bits_of``."""
    return np.int32(bits).view(np.float32)


@inline
def largest(x: F1, start: Whole, end: Whole) -> Real:
    """The largest magnitude; NaN counts as larger than anything."""
    top = np.int32(0)
    for i in range(start, end):
        top = max(top, np.int32(bits_of(x[i]) & 0x7FFFFFFF))
    return from_bits(top)


@inline
def power_of_two_scale(amax: Real, floor: Real, by_largest: Real) -> Real:
    """The scale of a block: a power of two at or above ``amax`` over the format's maximum."""
    amax = floor if amax < floor else amax
    bits = min(bits_of(amax * by_largest), _INFINITY) + 0x7FFFFF
    return from_bits(bits & _INFINITY)


@inline
def clamp(x: Real, limit: Real) -> Real:
    """Within +-limit; NaN stays."""
    x = limit if x > limit else x
    return -limit if x < -limit else x


@inline
def round_e4m3(x: Real) -> Real:
    """The nearest E4M3 value of ``x`` within +-448, ties to even; NaN stays.

    Normal numbers keep three bits of the mantissa. Below 2^-6 the grid is 2^-9 wide, which is that
    of float32 around 24576.
    """
    bits = bits_of(x)
    normal = from_bits((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF)
    magic = np.float32(24576.0)
    small = (x + magic) - magic
    return small if abs(x) < np.float32(2.0**-6) else normal


@inline
def encode_e4m3(x: Real) -> Whole:
    """The code of the nearest E4M3 value of ``x`` within +-448; 127 for NaN."""
    sign = (bits_of(x) >> 24) & 0x80
    magnitude = round_e4m3(abs(x))
    if magnitude != magnitude:
        return sign | 0x7F
    if magnitude < np.float32(2.0**-6):
        return sign | np.int32(magnitude * np.float32(512.0))
    return sign | ((bits_of(magnitude) >> 20) - (120 << 3))


@inline
def encode_e2m1(x: Real) -> Whole:
    """The code of the nearest E2M1 value of ``x`` within +-6, ties to even."""
    sign = (bits_of(x) >> 28) & 8
    magnitude = abs(x)
    if magnitude < np.float32(1.0):
        magic = np.float32(6291456.0)  # float32 is a half apart here
        return sign | np.int32(((magnitude + magic) - magic) * np.float32(2.0))
    bits = bits_of(magnitude)
    return sign | (((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - (126 << 1))


@inline
def round_trip_fp8(x: F1, block: Whole, out: F1) -> None:
    """Quantise a row to E4M3 with a power of two for each block of channels, and back."""
    for start in range(0, x.shape[0], block):
        end = min(start + block, x.shape[0])
        scale = power_of_two_scale(largest(x, start, end), _E4M3_FLOOR, _BY_E4M3_MAX)
        for i in range(start, end):
            out[i] = round_e4m3(clamp(x[i] / scale, _E4M3_MAX)) * scale


@inline
def _block_of(record: Whole) -> Whole:
    """Channels that share a scale."""
    if record == FP4_16:
        return 16
    return 64 if record == FP8_64 else 32


@inline
def _rotary_of(channels: Whole, values: U1, record: Whole) -> Whole:
    """Channels at a row's end that are bf16, of which each takes one byte more than a code."""
    return values.shape[0] - channels if record == FP8_64 else 0


@inline
def _encode_bfloat16(x: F1, first: Whole, values: U1, at: Whole) -> None:
    """Channels from ``first`` on, two bytes each from ``at`` on."""
    for i in range(first, x.shape[0]):
        bits = bits_of(x[i])
        if x[i] == x[i]:
            bits += 0x7FFF + ((bits >> 16) & 1)
        else:
            bits = 0x7FC00000
        values[at], values[at + 1] = (bits >> 16) & 0xFF, (bits >> 24) & 0xFF
        at += 2


@inline
def _decode_bfloat16(values: U1, at: Whole, first: Whole, out: F1) -> None:
    """The inverse of ``_encode_bfloat16``."""
    for i in range(first, out.shape[0]):
        out[i] = from_bits((np.int32(values[at]) << 16) | (np.int32(values[at + 1]) << 24))
        at += 2


@inline
def _encode_plain(x: F1, values: U1, record: Whole) -> None:
    if record == BFLOAT16:
        _encode_bfloat16(x, 0, values, 0)
        return
    for i in range(x.shape[0]):
        bits = bits_of(x[i])
        for b in range(4):
            values[4 * i + b] = (bits >> (8 * b)) & 0xFF


@inline
def encode_row(x: F1, values: U1, scales: U1, record: Whole) -> None:
    """Quantise a row as a record stores it."""
    if record >= BFLOAT16:
        _encode_plain(x, values, record)
        return
    block = _block_of(record)
    quantized = x.shape[0] - _rotary_of(x.shape[0], values, record)
    _encode_bfloat16(x, quantized, values, quantized)
    for b in range(quantized // block, scales.shape[0]):
        scales[b] = 0
    for b in range(quantized // block):
        start = b * block
        amax = largest(x, start, start + block)
        if record == FP4_16:
            amax = _FP4_16_FLOOR if amax < _FP4_16_FLOOR else amax
            scales[b] = encode_e4m3(clamp(amax / _E2M1_MAX, _E4M3_MAX))
            scale = _E4M3[scales[b]]
        else:
            if record == FP4_32:
                scale = power_of_two_scale(amax, _FP4_FLOOR, _BY_E2M1_MAX)
            else:
                scale = power_of_two_scale(amax, _E4M3_FLOOR, _BY_E4M3_MAX)
            scales[b] = bits_of(scale) >> 23
        if record in (FP8_32, FP8_64):
            for i in range(start, start + block):
                values[i] = encode_e4m3(clamp(x[i] / scale, _E4M3_MAX))
        else:
            for i in range(start, start + block, 2):
                low = encode_e2m1(clamp(x[i] / scale, _E2M1_MAX))
                high = encode_e2m1(clamp(x[i + 1] / scale, _E2M1_MAX))
                values[i // 2] = low | (high << 4)


@inline
def decode_row(values: U1, scales: U1, record: Whole, out: F1) -> None:
    """The inverse of ``encode_row``, but for FLOAT32."""
    if record == BFLOAT16:
        _decode_bfloat16(values, 0, 0, out)
        return
    block = _block_of(record)
    quantized = out.shape[0] - _rotary_of(out.shape[0], values, record)
    _decode_bfloat16(values, quantized, quantized, out)
    for b in range(quantized // block):
        scale = _E4M3[scales[b]] if record == FP4_16 else _UE8M0[scales[b]]
        if record in (FP8_32, FP8_64):
            for i in range(b * block, (b + 1) * block):
                out[i] = _E4M3[values[i]] * scale
        else:
            for i in range(b * block // 2, (b + 1) * block // 2):
                out[2 * i] = _E2M1[values[i] & 15] * scale
                out[2 * i + 1] = _E2M1[values[i] >> 4] * scale


@splice
def load_row(
    values: Packed,
    scales: Packed,
    record: Whole,
    floats: F3,
    outer: Whole,
    inner: Whole,
    out: F2,
    at: Whole,
) -> None:
    """A row of a field, as ``pages_of`` has it, to ``out[at]``."""
    if record == FLOAT32:
        for i in range(out.shape[1]):
            out[at, i] = floats[outer, inner, i]
    else:
        decode_row(values[outer, inner], scales[outer, inner], record, out[at])
