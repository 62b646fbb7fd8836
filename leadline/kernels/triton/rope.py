"""Angles of rotary embeddings, once a step for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.triton.launch import await_previous, overlapped

_BLOCK_ROWS = 8


def rope_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Programs over blocks of rows; both results in one launch."""
    rows, half = len(positions), len(frequencies)
    cos, sin = torch.empty(2, rows, half, dtype=torch.float32, device=positions.device)
    if rows:
        _angles[(triton.cdiv(rows, _BLOCK_ROWS),)](
            positions,
            frequencies,
            cos,
            sin,
            rows,
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            BLOCK_ROWS=_BLOCK_ROWS,
            **overlapped(),
        )
    return cos, sin


@triton.jit
def _angles(
    positions,
    frequencies,
    cos,
    sin,
    rows,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    await_previous()
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    position = tl.load(positions + row, mask=row < rows, other=0).to(tl.float32)
    angle = position * tl.load(frequencies + pair, mask=pair < HALF, other=0.0)
    inside = (row < rows) & (pair < HALF)
    tl.store(cos + row * HALF + pair, tl.cos(angle), mask=inside)
    tl.store(sin + row * HALF + pair, tl.sin(angle), mask=inside)
