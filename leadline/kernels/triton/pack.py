"""Rows of caches inside kernels: rotated, packed and stored, as tiles of quantisation blocks.

A tile is ``[blocks, width]`` float32: consecutive channels of one row or of several, ``width`` of
them sharing a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.triton import formats


def block_width(record: Record) -> int:
    """Channels of a tile's block: those that share a scale in this record, 32 where none do."""
    return {Record.FP4_16: 16, Record.FP8_64: 64}.get(record, 32)


def packs(field: RecordField, width: int) -> bool:
    """Whether rows of so many channels are tiles: a power of two, and blocks rotary or not."""
    whole = width == triton.next_power_of_2(width) and width >= block_width(field.record)
    return whole and field.rotary % 64 == 0


def field_arguments(field: RecordField) -> tuple[object, ...]:
    """Values, scales and the strides of both, as kernels take a field; no scales give values."""
    scales = field.values if field.scales is None else field.scales
    return field.values, scales, *field.values.stride()[:2], *scales.stride()[:2]


@triton.jit
def load_angles(channel, cos, sin, PAIRS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """Where a tile rotates, and the cosines and sines there, ``[blocks, PAIRS]`` each.

    Args:
        channel: ``[blocks]`` place of each block's first channel in its row.
        cos: ``[blocks]`` pointers to the cosines of each block's row.
        sin: likewise.
        PAIRS: half a block's channels.
        WIDTH: channels of a row.
        HALF: pairs of a row that rotate, its last ones.
    """
    pair = (channel - (WIDTH - 2 * HALF))[:, None] // 2 + tl.arange(0, PAIRS)[None, :]
    rotates = pair >= 0
    c = tl.load(cos[:, None] + pair, mask=rotates, other=1.0)
    s = tl.load(sin[:, None] + pair, mask=rotates, other=0.0)
    return rotates, c, s


@triton.jit
def rotate_pairs(x, rotates, c, s):
    """Turn the tile ``x`` by what ``load_angles`` gave, rounded to bf16 (v41-model 3.2)."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    # Selected, not multiplied by one: the sign of a zero would change, and with it a code.
    turned_even = tl.where(rotates, even * c - odd * s, even)
    turned_odd = tl.where(rotates, even * s + odd * c, odd)
    turned = tl.reshape(tl.join(turned_even, turned_odd), x.shape)
    return formats.to_bf16(turned).to(tl.float32)


@triton.jit
def store_blocks(x, values, scales, block, mask, RECORD: tl.constexpr, STILL: tl.constexpr):
    """Pack a tile and store it.

    Args:
        x: the tile.
        values: ``[blocks]`` pointers to the values of each block's row.
        scales: ``[blocks]`` pointers to its scales.
        block: ``[blocks]`` place of each block in its row.
        mask: ``[blocks]`` which are stored.
        RECORD: value of a ``Record``.
        STILL: channels of a row in front of those that rotate.
    """
    BLOCKS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    if RECORD == "fp4_16" or RECORD == "fp4_32":
        if RECORD == "fp4_16":
            scale = formats.fp4_16_scale(formats.absmax(x, 1))
            scaled = tl.div_rn(x, tl.broadcast_to(formats.decode_e4m3(scale)[:, None], x.shape))
        else:
            scale = formats.fp4_32_scale(formats.absmax(x, 1)).to(tl.uint8)
            scaled = x * formats.reciprocal_of_scale(scale)[:, None]
        codes = tl.reshape(formats.encode_e2m1(scaled), [BLOCKS, WIDTH // 2, 2])
        low, high = tl.split(codes)
        at = values[:, None] + block[:, None] * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
        tl.store(at, (low | (high << 4)).to(tl.uint8), mask=mask[:, None])
        tl.store(scales + block, scale, mask=mask)
    else:
        at = values[:, None] + block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        if RECORD == "fp8_32" or RECORD == "fp8_64":
            scale = formats.fp8_scale(formats.absmax(x, 1)).to(tl.uint8)
            codes = formats.encode_e4m3(x * formats.reciprocal_of_scale(scale)[:, None])
            if RECORD == "fp8_64":  # two bytes for each channel that rotates, and no scale
                still = block * WIDTH < STILL
                moved = at + (block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :] - STILL)
                moved = moved.to(tl.pointer_type(tl.bfloat16), bitcast=True)
                tl.store(moved, formats.to_bf16(x), mask=(mask & ~still)[:, None])
                tl.store(scales + block, tl.where(still, scale, 0), mask=mask)
                mask &= still
            else:
                tl.store(scales + block, scale, mask=mask)
            tl.store(at, codes, mask=mask[:, None])
        else:
            tl.store(at, formats.cast(x, values.dtype.element_ty), mask=mask[:, None])
