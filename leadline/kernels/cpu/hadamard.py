"""The Hadamard transform of index vectors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leadline.kernels.cpu.jit import F1, F2, in_float32, inline, kernel
from leadline.kernels.reference import hadamard as reference


@inline
def transform_row(x: F1) -> None:
    """In place; sums in the order of the reference."""
    n, half = x.shape[0], 1
    while half < n:
        for start in range(0, n, 2 * half):
            for i in range(start, start + half):
                low, high = x[i], x[i + half]
                x[i], x[i + half] = low + high, low - high
        half *= 2
    scale = np.float32(n**-0.5)
    for i in range(n):
        x[i] *= scale


@in_float32(reference.hadamard)
def hadamard(x: Tensor) -> Tensor:
    """Row by row."""
    out = x.clone(memory_format=torch.contiguous_format)
    _transform(out.view(-1, x.shape[-1]))
    return out


@kernel
def _transform(x: F2) -> None:
    for r in range(x.shape[0]):
        transform_row(x[r])
