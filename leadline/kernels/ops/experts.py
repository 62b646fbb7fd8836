"""Routed and shared experts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from leadline.kernels.packed import Weight
from leadline.kernels.reference import experts
from leadline.kernels.registry import op


@op()
def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Weight,
    w2: Weight,
    *,
    limit: float,
    row_scales: bool = False,
    shared: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Sum of the chosen experts' outputs, in ascending expert order (5.2, 5.3).

    Hidden rows whose scales are to be those of 128 channels may have one for 32 of them, which is
    finer (v4-model 9.11): 3e-4 of a row's length at most, see ``quant.round_trip_fp8_row``.

    Args:
        x: ``[m, D]`` activations.
        ids: ``[m, k]`` int64, ascending; -1 (masked, or not of this rank) adds nothing.
        weights: ``[m, k]`` wide; multiplied into the hidden row before its rounding.
        w13: ``[E, 2 F, D]``, gate rows first.
        w2: ``[E, D, F]``.
        limit: ``swiglu_limit``.
        row_scales: inputs that are quantised get one power of two a row instead of one for 32 or
            128 channels (``quant.round_trip_fp8_row``), for FP8 tensor cores; an approximation.
            Where these would not be faster a backend may keep the finer scales.
        shared: gives ``[m, D]`` activations, the shared expert's output, which is added last: asked
            once the products have been launched, since it may have to wait.

    Returns:
        ``[m, D]`` activations, rounded once; without ``shared`` wide, not rounded.
    """
    return experts.routed_experts(
        x, ids, weights, w13, w2, limit=limit, row_scales=row_scales, shared=shared
    )


@op()
def shared_expert(x: Tensor, w13: Weight, w2: Weight, *, limit: float) -> Tensor:
    """The shared expert (5.3): ``[m, D]`` -> ``[m, D]`` activations.

    Args:
        x: ``[m, D]`` activations.
        w13: ``[2 F, D]``, gate rows first.
        w2: ``[D, F]``.
        limit: ``swiglu_limit``.
    """
    return experts.shared_expert(x, w13, w2, limit=limit)
