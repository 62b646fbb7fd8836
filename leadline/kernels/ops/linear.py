"""Matrix products with plain or packed weights."""

from __future__ import annotations

from torch import Tensor

from leadline.kernels.packed import Weight
from leadline.kernels.reference import linear as reference
from leadline.kernels.registry import op


@op()
def linear(x: Tensor, weight: Weight) -> Tensor:
    """``x W^T``; the input is quantised to FP8 first where W was packed (7.3).

    Its blocks have as many channels as the weight says, 32 or 128.

    Args:
        x: ``[m, in]`` activations.
        weight: ``[out, in]``.

    Returns:
        ``[m, out]`` activations.
    """
    return reference.linear(x, weight)


@op()
def grouped_linear(x: Tensor, weight: Weight) -> Tensor:
    """One matrix per output group; the input is never quantised (3.8).

    Args:
        x: ``[m, G, in]`` activations.
        weight: ``[G, out, in]``.

    Returns:
        ``[m, G, out]`` activations.
    """
    return reference.grouped_linear(x, weight)


@op()
def output_projection(x: Tensor, wo_a: Weight, wo_b: Weight) -> Tensor:
    """Outputs of the heads, rotated back, through two low-rank matrices (3.8, kernels.md 9).

    Args:
        x: ``[m, H, d]`` activations.
        wo_a: ``[G, out, H d / G]``, see ``grouped_linear``.
        wo_b: ``[D, G out]``, see ``linear``.

    Returns:
        ``[m, D]`` activations.
    """
    grouped = x.flatten(1).unflatten(1, (wo_a.shape[0], -1))
    return linear(grouped_linear(grouped, wo_a).flatten(1), wo_b)


@op()
def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """A wide product of wide operands: the head and the gated compressors (2.1, 3.3).

    Args:
        x: ``[m, in]`` activations.
        weight: ``[out, in]`` wide, or bf16 where that is exact.

    Returns:
        ``[m, out]`` wide.
    """
    return reference.wide_linear(x, weight)
