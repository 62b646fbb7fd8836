"""Activations as operands of FP8 tensor cores, sorted by expert (kernels.md 10.3).

E4M3 with one power of two a row, so that it counts once a sum. Blocks of 32 or 128 channels keep
the values that a power of their own gave them, but for those 2^-15 below the row's largest, which
fall on multiples of 2^-9 of its power. That moves a row by no more than 3.1e-4 of its length
(``reference.quant.round_trip_fp8_row``), and mostly by far less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.triton.expert_tiles import Tiles
from leadline.kernels.triton.formats import (
    absmax,
    decode_ue8m0,
    encode_e4m3,
    fp8_scale,
    reciprocal_of_scale,
)
from leadline.kernels.triton.quant import nearest_fp8

GROUP = 128
"""Channels that lie together."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Rows of activations as the products take them.

    Attributes:
        codes: ``[K / 128, n, 128]`` E4M3, uint8: 128 channels of all rows lie together.
        powers: ``[n]`` float32: what the codes of a row count.
    """

    codes: Tensor
    powers: Tensor


def arrange(
    x: Tensor, input_block: int, tiles: Tiles | None = None, ids: Tensor | None = None
) -> Inputs:
    """Rows rounded to FP8, then as ``Inputs`` have them.

    Args:
        x: ``[m, K]`` bf16, K a multiple of 256.
        input_block: channels that share a power where rows are rounded, 32 or 128; K for all.
        tiles: of ``ids``: inputs are those of sorted pairs; where no pair is, they are any.
        ids: ``[m, k]``, contiguous. Without them inputs are the rows in their order.
    """
    num_rows, width = x.shape
    num_pairs = num_rows if ids is None else ids.numel()
    codes = torch.empty(width // GROUP, num_pairs, GROUP, dtype=torch.uint8, device=x.device)
    powers = torch.empty(num_pairs, device=x.device)
    _arrange[(num_rows,)](
        x,
        x.stride(0),
        ids,
        None if tiles is None else tiles.places,
        codes,
        powers,
        num_pairs,
        WIDTH=width,
        PER_ROW=num_pairs // num_rows,
        SCALED=0 if input_block == width else input_block,
        GROUP=GROUP,
        num_warps=8 if width > 2048 else 4,
    )
    return Inputs(codes, powers)


@triton.jit
def _arrange(
    x,
    stride,
    ids,
    places,
    codes,
    powers,
    num_pairs,
    WIDTH: tl.constexpr,
    PER_ROW: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One row, for all of its pairs."""
    BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH)
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    inside = channel < WIDTH
    value = tl.load(x + row.to(tl.int64) * stride + channel, mask=inside, other=0.0)
    value = value.to(tl.float32)
    if SCALED:
        value = nearest_fp8(value.reshape(1, BLOCK), SCALED).reshape(BLOCK)
    exponent = fp8_scale(absmax(value, 0))
    code = encode_e4m3(value * reciprocal_of_scale(exponent))
    # Even channels of 32, which are low nibbles of weights, then the odd ones.
    code = code.reshape(BLOCK // 32, 16, 2).permute(0, 2, 1).reshape(BLOCK)
    power = decode_ue8m0(exponent) * 64.0  # weights are 2^-6 of what they are
    at = (channel // GROUP).to(tl.int64) * (num_pairs * GROUP) + channel % GROUP
    for slot in tl.static_range(PER_ROW):
        pair = row * PER_ROW + slot
        if ids is None:
            place = pair.to(tl.int64)
            is_there = True
        else:
            is_there = tl.load(ids + pair) >= 0
            place = tl.load(places + pair, mask=is_there, other=0).to(tl.int64)
        tl.store(codes + at + place * GROUP, code, mask=inside & is_there)
        tl.store(powers + place, power, mask=is_there)
