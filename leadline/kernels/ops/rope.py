"""Rotary embedding of the last channels, and its angles."""

from __future__ import annotations

from torch import Tensor

from leadline.kernels.reference import rope
from leadline.kernels.registry import op

rope_angles = op(watched=False)(rope.rope_angles)


@op()
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last r channels, adjacent pairs being complex numbers (3.2).

    Args:
        x: ``[m, n]`` or ``[m, heads, n]`` activations.
        cos: ``[m, r / 2]`` float32.
        sin: ``[m, r / 2]`` float32.

    Returns:
        The shape and dtype of ``x``.
    """
    return rope.rotate(x, cos, sin)
