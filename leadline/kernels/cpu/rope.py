"""Rotary embedding of the last channels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leadline.kernels.cpu.jit import F1, F2, F3, in_float32, inline, kernel
from leadline.kernels.reference import rope


@inline
def rotate_row(
    x: F1,
    cos: F1,
    sin: F1,
    out: F1,
) -> None:
    """Adjacent channels times ``exp(i angle)``; ``out`` may be ``x``."""
    first = x.shape[0] - 2 * cos.shape[0]
    for i in range(first):
        out[i] = x[i]
    for j in range(cos.shape[0]):
        even, odd = x[first + 2 * j], x[first + 2 * j + 1]
        out[first + 2 * j] = even * cos[j] - odd * sin[j]
        out[first + 2 * j + 1] = even * sin[j] + odd * cos[j]


@in_float32(rope.rotate)
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One pass over rows and heads."""
    out = np.empty(x.shape, np.float32)
    if x.dim() == 2:  # one head
        _rotate(x.unsqueeze(1), cos, sin, out[:, None])
    else:
        _rotate(x, cos, sin, out)
    return torch.from_numpy(out)


@kernel
def _rotate(x: F3, cos: F2, sin: F2, out: F3) -> None:
    rows, heads, _ = x.shape
    for r in range(rows):
        for h in range(heads):
            rotate_row(x[r, h], cos[r], sin[r], out[r, h])
