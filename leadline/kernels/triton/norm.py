"""RMS norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.triton.formats import cast
from leadline.kernels.triton.launch import await_previous, overlapped


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """One program a row."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, width = x.shape
    if rows:
        _rms_norm[(rows,)](
            x,
            weight,
            out,
            x.stride(0),
            width,
            eps,
            triton.next_power_of_2(width),
            num_warps=4,
            **overlapped(),
        )
    return out


@triton.jit
def _rms_norm(x, weight, out, stride, width, eps, BLOCK: tl.constexpr):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    norm_row(x + row * stride, weight, out + row * width, width, eps, BLOCK)


@triton.jit
def norm_row(x, weight, out, width, eps, BLOCK: tl.constexpr):
    """The row at ``x``, normalised, to ``out``."""
    channel = tl.arange(0, BLOCK)
    inside = channel < width
    value = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value) / width + eps)
    tl.store(out + channel, cast(value * factor * gain, out.dtype.element_ty), mask=inside)
