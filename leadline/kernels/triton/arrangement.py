"""Tokens in the order of channels in which ``packed_matmul_hopper`` multiplies them.

A sum over channels does not mind their order. A thread that loads sixteen bytes has the codes of
sixteen neighbours, four of which are its share of a matrix instruction: pairs of two that are 8
apart. So of every 64 channels the pairs are transposed, as are those of tokens here: what four
threads load at once is one instruction after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.packed import PackedWeight
from leadline.kernels.triton.launch import hold_next, overlapped
from leadline.kernels.triton.quant import on_fp8_grid

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Arranged:
    """Tokens of a product.

    Attributes:
        values: ``[G in / 64, m, 64]`` bf16: 64 channels of all tokens lie together.
    """

    values: Tensor

    @staticmethod
    def empty(tokens: int, weight: PackedWeight) -> Arranged:
        """For this weight, to be written by ``store_arranged``."""
        groups, _, width = weight.codes.shape
        shape = groups * width // 64, tokens, 64
        return Arranged(torch.empty(shape, dtype=torch.bfloat16, device=weight.codes.device))


def arrange(x: Tensor, weight: PackedWeight) -> Arranged:
    """bf16 ``[m, G, in]``, in a multiple of 64, rounded to FP8 if the weight wants that."""
    tokens, groups, width = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    arranged = Arranged.empty(tokens, weight)
    _arrange[(tokens, groups, triton.cdiv(width, _BLOCK))](
        x,
        arranged.values,
        x.stride(0),
        x.stride(1),
        width,
        INPUT_BLOCK=weight.input_block if weight.quantizes_input else 0,
        BLOCK=_BLOCK,
        num_warps=4,
        **overlapped(),
    )
    return arranged


@triton.jit
def _arrange(
    x, values, x_stride, x_group_stride, width, INPUT_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):
    """Some channels of one token's group."""
    token, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel = part * BLOCK + tl.arange(0, BLOCK)
    hold_next()
    at = x + token.to(tl.int64) * x_stride + group * x_group_stride + channel
    value = tl.load(at, mask=channel < width, other=0.0)
    if INPUT_BLOCK:
        value = on_fp8_grid(value.to(tl.float32).reshape(1, BLOCK), INPUT_BLOCK).reshape(BLOCK)
    store_arranged(value, values, group, token, tl.num_programs(0), part, width)


@triton.jit
def store_arranged(value, values, group, token, num_tokens, part, width):
    """Write a part of a token's group to ``Arranged.values``.

    Args:
        value: ``[n]`` bf16 from channel ``part n`` on.
        values: of ``Arranged``.
        group: of the weight.
        token: whose value it is.
        num_tokens: of all.
        part: which of the parts.
        width: channels of a group.
    """
    BLOCK: tl.constexpr = value.shape[0]
    # [.., thread, 8 apart, pair, neighbour]: pairs of a thread follow one another.
    value = value.reshape(BLOCK // 64, 4, 2, 4, 2).permute(0, 3, 2, 1, 4).reshape(BLOCK)
    place = part * BLOCK + tl.arange(0, BLOCK)
    block = group * (width // 64) + place // 64
    at = values + (block.to(tl.int64) * num_tokens + token) * 64 + place % 64
    tl.store(at, value, mask=place < width)
