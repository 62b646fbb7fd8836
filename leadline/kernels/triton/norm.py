"""RMS norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.triton.formats import cast
from leadline.kernels.triton.launch import await_previous, overlapped

_VALUES = 2048  # of a program, unless one row has more


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """One program a row, or for several short ones, as the heads of queries are."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, width = x.shape
    if rows:
        block = triton.next_power_of_2(width)
        together = max(1, _VALUES // block)
        _rms_norm[(triton.cdiv(rows, together),)](
            *(x, weight, out, x.stride(0), rows, width, eps, together, block),
            num_warps=4,
            **overlapped(),
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(x, weight, out, stride, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    await_previous()
    row = (tl.program_id(0) * ROWS).to(tl.int64) + tl.arange(0, ROWS)[:, None]
    norm_rows(x + row * stride, weight, out + row * width, row < rows, width, eps, BLOCK)


@triton.jit
def norm_rows(x, weight, out, live, width, eps, BLOCK: tl.constexpr):
    """Rows at pointers ``x``, ``[n, 1]``, normalised, to those of ``out`` where they are live."""
    channel = tl.arange(0, BLOCK)[None, :]
    inside = live & (channel < width)
    value = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + channel, mask=channel < width, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
    tl.store(out + channel, cast(value * factor * gain, out.dtype.element_ty), mask=inside)
