"""RMSNorm."""

from __future__ import annotations

from torch import Tensor

from leadline.kernels.reference import norm
from leadline.kernels.registry import op


@op()
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Root-mean-square norm with the weight multiplied before the one rounding (2.2).

    Args:
        x: ``[m, n]`` activations.
        weight: ``[n]`` wide.
        eps: added to the mean square.

    Returns:
        ``[m, n]`` activations.
    """
    return norm.rms_norm(x, weight, eps=eps)
