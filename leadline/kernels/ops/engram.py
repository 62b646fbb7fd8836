"""Engram: n-gram histories, hashes and rows, and the gated injection of these."""

from __future__ import annotations

from torch import Tensor

from leadline.kernels.reference import engram
from leadline.kernels.registry import op

engram_history = op(watched=False)(engram.engram_history)
engram_hash = op(watched=False)(engram.engram_hash)
gather_rows = op(watched=False)(engram.gather_rows)


@op()
def engram_inject(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, live: Tensor, *, eps: float
) -> Tensor:
    """Add gated n-gram values to every stream (6.4).

    Args:
        streams: ``[m, S, D]`` activations.
        kv: ``[m, (S + 1) D]`` activations: a key per stream, then the value.
        q_weight: ``[S, D]``.
        k_weight: ``[S, D]``.
        live: ``[m]`` bool; rows of images and padding stay untouched.
        eps: of both statistics.

    Returns:
        ``[m, S, D]`` activations.
    """
    return engram.engram_inject(streams, kv, q_weight, k_weight, live, eps=eps)
