"""The Hadamard transform, which spreads index vectors before they are quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.kernels.reference.accumulate import widen


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal transform of the last dim in natural order (v4-model 3.4); its own inverse.

    ``y[i] = n^-1/2 sum_k (-1)^popcount(i & k) x[k]``, rounded once. Products of two vectors that
    both went through it are what they were.

    Args:
        x: ``[..., n]`` activations, n a power of two.
    """
    y, n = widen(x), x.shape[-1]
    half = 1
    while half < n:
        low, high = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        half *= 2
    return (y * n**-0.5).to(x.dtype)
