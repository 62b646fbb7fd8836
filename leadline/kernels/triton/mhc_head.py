"""The weights by which V4's last streams become one row (v4-model 2.2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.triton.launch import await_previous, overlapped
from leadline.kernels.triton.mhc import project


def mhc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, hc_eps: float, eps: float
) -> Tensor:
    """Two launches: parts of the projection, as those of coefficients; then their sum."""
    rows, num_streams, width = streams.shape
    mix = torch.empty(rows, num_streams, dtype=fn.dtype, device=fn.device)
    if rows:
        partial = project(streams, fn)
        parts, _, columns = partial.shape
        _mix[(rows,)](
            *(partial, base, scale, mix, rows, parts, num_streams * width, hc_eps, eps),
            S=num_streams,
            COLUMNS=columns,
            BLOCK=triton.next_power_of_2(parts),
            num_warps=1,
            **overlapped(),
        )
    return mix


@triton.jit(do_not_specialize=["rows"])
def _mix(
    partial,
    base,
    scale,
    mix,
    rows,
    parts,
    width,
    hc_eps,
    eps,
    S: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the sum of its parts, in order, and what becomes of it."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, S)
    part = tl.arange(0, BLOCK)[:, None]
    source = partial + (part * rows + row) * COLUMNS
    products = tl.sum(tl.load(source + s[None, :], mask=part < parts, other=0.0), 0)
    squares = tl.sum(tl.load(source + S, mask=part < parts, other=0.0))
    factor = tl.rsqrt(squares / width + eps) * tl.load(scale)
    tl.store(mix + row * S + s, tl.sigmoid(products * factor + tl.load(base + s)) + hc_eps)
