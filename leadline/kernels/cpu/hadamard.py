"""The Hadamard transform."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leadline.kernels.cpu.jit import F1, F2, inline, kernel


@inline
def transform_row(x: F1) -> None:
    """In place: sums and differences of values that are 1, 2, 4 .. apart."""
    half = 1
    while half < x.shape[0]:
        for start in range(0, x.shape[0], 2 * half):
            for i in range(start, start + half):
                low, high = x[i], x[i + half]
                x[i], x[i + half] = low + high, low - high
        half *= 2
    scale = np.float32(x.shape[0] ** -0.5)
    for i in range(x.shape[0]):
        x[i] *= scale


def hadamard(x: Tensor) -> Tensor:
    """Of every row of a float32 tensor."""
    out = x.numpy().copy()
    _transform(out.reshape(-1, x.shape[-1]))
    return torch.from_numpy(out)


@kernel
def _transform(x: F2) -> None:
    for r in range(x.shape[0]):
        transform_row(x[r])
