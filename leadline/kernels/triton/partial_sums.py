"""Partial sums of a product, added in order; and what follows them in the same launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.triton.arrangement import Arranged, store_arranged
from leadline.kernels.triton.formats import to_bf16
from leadline.kernels.triton.launch import await_previous, hold_next, overlapped
from leadline.kernels.triton.operand import Operand, store_operand
from leadline.kernels.triton.quant import on_fp8_grid


def add_parts(parts: Tensor) -> Tensor:
    """Partial sums ``[splits, m, n]`` -> ``[m, n]`` bf16."""
    if len(parts) == 1:
        return parts[0]
    out = parts.new_empty(parts.shape[1:], dtype=torch.bfloat16)
    add_parts_into(parts, out)
    return out


def add_parts_into(
    parts: Tensor,
    out: Tensor | Operand | Arranged,
    *,
    input_block: int = 0,
    swiglu_limit: float | None = None,
) -> None:
    """Partial sums ``[splits, m, n]`` to ``out [m, n]``, or ``[m, n / 2]`` behind SwiGLU.

    Args:
        parts: float32 or bf16.
        out: bf16, or what the next product takes.
        input_block: quantise so many channels of ``out`` to FP8 and back, as an operand is where
            that is to be; 0 for no rounding.
        swiglu_limit: None for no SwiGLU.
    """
    splits, tokens, width = parts.shape
    out_width = width if swiglu_limit is None else width // 2
    target, powers, terms, scaled = out, None, 1, 32
    if isinstance(out, Operand):
        target, powers, terms, scaled = out.codes, out.powers, out.terms, out.scaled
        input_block = out.input_block
    elif isinstance(out, Arranged):
        target = out.values
    block = 256 if splits > 1 else 1024
    _sum_parts[(tokens, triton.cdiv(out_width, block))](
        parts,
        target,
        powers,
        splits,
        tokens,
        out_width,
        swiglu_limit,
        SPLITS=triton.next_power_of_2(splits),
        SWIGLU=swiglu_limit is not None,
        INPUT_BLOCK=input_block,
        ARRANGED=isinstance(out, Arranged),
        TERMS=terms,
        SCALED=scaled,
        BLOCK=block,
        num_warps=2,
        **overlapped(),
    )


@triton.jit(do_not_specialize=["splits", "num_tokens"])
def _sum_parts(
    parts,
    out,
    powers,
    splits,
    num_tokens,
    out_width,
    limit,
    SPLITS: tl.constexpr,
    SWIGLU: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    ARRANGED: tl.constexpr,
    TERMS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of a token's parts, rounded to bf16, and what follows it."""
    token = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < out_width
    mask = inside & (split < splits)
    if powers is not None or ARRANGED:  # the product that takes it fills the GPU
        hold_next()
    else:
        await_previous()
    if SWIGLU:
        at = parts + (split * num_tokens + token) * 2 * out_width + channel
        gate = _rounded_sum(at, mask)
        up = _rounded_sum(at + out_width, mask)
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        value = gate / (1 + tl.exp(-gate)) * up
    else:
        value = _rounded_sum(parts + (split * num_tokens + token) * out_width + channel, mask)
    result = to_bf16(value)
    part = tl.program_id(1)
    if powers is not None:
        store_operand(
            *(result, out, powers, 0, token, num_tokens, part, out_width),
            *(TERMS, INPUT_BLOCK, SCALED),
        )
    else:
        if INPUT_BLOCK:
            result = on_fp8_grid(result.to(tl.float32).reshape(1, BLOCK), INPUT_BLOCK)
            result = result.reshape(BLOCK)
        if ARRANGED:
            store_arranged(result, out, 0, token, num_tokens, part, out_width)
        else:
            tl.store(out + token * out_width + channel, result, mask=inside)


@triton.jit
def _rounded_sum(at, mask):
    """All parts are loaded at once; a sum over an axis has one order."""
    return to_bf16(tl.sum(tl.load(at, mask=mask, other=0.0).to(tl.float32), 0)).to(tl.float32)
