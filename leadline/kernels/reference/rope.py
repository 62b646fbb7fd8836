"""Rotary embedding of the last channels, and its frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leadline.kernels.reference.accumulate import widen


def rope_frequencies(dim: int, theta: float) -> Tensor:
    """Base frequencies ``[dim / 2]`` float32: ``theta ** (-2 i / dim)`` (v41-model 3.2)."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def yarn_frequencies(
    dim: int,
    theta: float,
    *,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_max_position_embeddings: int,
) -> Tensor:
    """Frequencies ``[dim / 2]`` after YaRN; used at every length (v41-model 3.2)."""

    def corrected_dim(beta: float) -> float:
        turns = original_max_position_embeddings / (2 * math.pi * beta)
        return dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(corrected_dim(beta_fast)), 0)
    high = min(math.ceil(corrected_dim(beta_slow)), dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float32)
    ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    base = rope_frequencies(dim, theta)
    return (base / factor) * ramp + base * (1 - ramp)


def rope_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cos and sin of every row's angles (3.2).

    The angle is the float32 product: near a million positions it is coarse, and every port's.

    Args:
        positions: ``[m]`` int64, absolute.
        frequencies: ``[r / 2]`` float32, of ``rope_frequencies`` or ``yarn_frequencies``.

    Returns:
        Cos and sin, each ``[m, r / 2]`` float32.
    """
    angles = positions.float().unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Multiply adjacent channel pairs by ``exp(+-i angle)``."""
    rope_dim = 2 * cos.shape[-1]
    if inverse:
        sin = -sin
    if x.dim() == 3:  # heads between rows and channels
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = widen(x[..., -rope_dim:]).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((x[..., :-rope_dim], turned.flatten(-2).to(x.dtype)), dim=-1)
