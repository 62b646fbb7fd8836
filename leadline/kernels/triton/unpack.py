"""Cache records expanded in registers: rows as bf16, in units of 2^16 (kernels.md 0.5, 8.3).

E2M1 and E4M3 bits moved to their places in a bf16 are the number times 2^-126 and 2^-120. One
multiplication brings back the factor together with the block's scale; its own factor would overflow
by 2^16, which stays missing. Whoever multiplies with the rows takes it back. All of it is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.core.errors import ConfigError
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.triton.formats import decode_e4m3, to_bf16
from leadline.kernels.triton.launch import NATIVE_CASTS

UNIT = tl.constexpr(2.0**-16)
"""What a row's values are multiplied with."""

_WORDS = {Record.FP4_16: torch.int32, Record.FP8_32: torch.int16, Record.FP8_64: torch.int16}
_ROTARY = tl.constexpr(64)  # channels of an FP8_64 row that are bf16: those of a block


def expands(field: RecordField, width: int) -> bool:
    """Whether rows of so many channels, of one of the records for keys, can be tiles."""
    return width == triton.next_power_of_2(width) and field.rotary in (0, _ROTARY.value)


def words(field: RecordField, word: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """A field as ``load_rows`` takes it, or in words of another type.

    Returns:
        Values ``[outer, inner, words]`` of the words that kernels unpack, and scales; both views.
        Of a plain record the second stands for nothing.

    Raises:
        ConfigError: no kernel expands this record.
    """
    if field.scales is None:
        return field.values, field.values
    if field.record not in _WORDS:
        raise ConfigError(
            f"kernels of the backend triton cannot expand {field.record} records into keys; choose "
            f"another kv_cache_dtype, or --kernel-backend reference"
        )
    return field.values.view(word or _WORDS[field.record]), field.scales


@triton.jit
def load_rows(values, scales, valid, RECORD: tl.constexpr, WIDTH: tl.constexpr):
    """Rows ``[n, WIDTH]`` that start at these pointers ``[n]``; 0 where not ``valid [n]``."""
    n: tl.constexpr = valid.shape[0]
    inside = valid[:, None]
    if RECORD == "fp4_16":
        packed = tl.load(values[:, None] + tl.arange(0, WIDTH // 8), mask=inside, other=0)
        codes = tl.load(scales[:, None] + tl.arange(0, WIDTH // 16), mask=inside, other=0)
        # The scale of a broken row is NaN; decode_e4m3 leaves that to its caller.
        scale = tl.where((codes & 0x7F) == 0x7F, float("nan"), decode_e4m3(codes) * 2.0**110)
        bits = tl.reshape(_spread_e2m1(packed), [n, WIDTH // 16, 16])
        rows = _times(bits, to_bf16(scale)[:, :, None])
    elif RECORD == "fp8_32":
        packed = tl.load(values[:, None] + tl.arange(0, WIDTH // 2), mask=inside, other=0)
        exponents = tl.load(scales[:, None] + tl.arange(0, WIDTH // 32), mask=inside, other=0)
        bits = tl.reshape(_spread_e4m3(packed), [n, WIDTH // 32, 32])
        rows = _times(bits, _power_of_two(exponents)[:, :, None])
    elif RECORD == "fp8_64":
        # Codes for all channels: the last block reads bytes of bf16, of no meaning as codes.
        packed = tl.load(values[:, None] + tl.arange(0, WIDTH // 2), mask=inside, other=0)
        exponents = tl.load(scales[:, None] + tl.arange(0, WIDTH // 64), mask=inside, other=0)
        turned = values[:, None] + ((WIDTH - _ROTARY) // 2 + tl.arange(0, _ROTARY))
        turned = _times(
            tl.load(turned, mask=inside, other=0), to_bf16(tl.full([1, 1], UNIT, tl.float32))
        )
        bits = tl.reshape(_spread_e4m3(packed), [n, WIDTH // 64, 64])
        rows = _times(bits, _power_of_two(exponents)[:, :, None])
        is_last = tl.arange(0, WIDTH // 64) == WIDTH // 64 - 1
        rows = tl.where(is_last[None, :, None], turned[:, None, :], rows)
    else:
        rows = tl.load(values[:, None] + tl.arange(0, WIDTH), mask=inside, other=0.0)
        rows = to_bf16(rows.to(tl.float32) * UNIT)
    return tl.reshape(rows, [n, WIDTH])


@triton.jit
def _spread_e4m3(packed):
    """Words ``[n, w]`` of two E4M3 each -> bits ``[n, w, 2]`` of bf16, in their order."""
    even = (packed << 8) & -0x8000 | (packed << 4) & 0x07F0
    return tl.join(even, packed & -0x8000 | (packed >> 4) & 0x07F0)


@triton.jit
def _spread_e2m1(packed):
    """Words ``[n, w]`` of eight E2M1 each -> bits ``[n, w, 2, 2, 2]`` of bf16, in their order.

    Nibble k of a word is channel k. Each pair of shifts brings nibbles k and k + 4 at once to where
    the two halves of a word have the sign, the last exponent bits and the first of the mantissa.
    """
    pairs = tl.join(
        tl.join(_place(packed << 12, packed << 6), _place(packed << 4, packed >> 2)),
        tl.join(_place(packed << 8, packed << 2), _place(packed, packed >> 6)),
    )
    halves = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.permute(halves, (0, 1, 4, 2, 3))


@triton.jit
def _place(signs, magnitudes):
    return signs & -0x7FFF8000 | magnitudes & 0x01C001C0


@triton.jit
def _power_of_two(exponents):
    """bf16 scale of UE8M0 bytes times 2^104: E4M3's factor in units of 2^16; NaN beyond 2^127.

    Only NaN and blocks with values above 10^9 are beyond.
    """
    raised = exponents.to(tl.int32) + 104
    bits = tl.where(raised > 254, 0x7FC0, raised << 7)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _times(bits, scale):
    """bf16 of these bits (int16) times bf16, where that is exact."""
    if NATIVE_CASTS:
        return bits.to(tl.bfloat16, bitcast=True) * scale
    value = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return to_bf16(value * scale.to(tl.float32))
