"""Window rows of a step: where they are, and how they get there."""

from __future__ import annotations

from torch import Tensor

from leadline.kernels.ops.kv_store import pack_rows, store_rows
from leadline.kernels.ops.norm import rms_norm
from leadline.kernels.ops.rope import rotate
from leadline.kernels.packed import RecordField
from leadline.kernels.reference import window
from leadline.kernels.registry import op

plan_window = op(watched=False)(window.plan_window)
commit_window = op(watched=False)(window.commit_window)


@op(watched=False)
def norm_rotate_store(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    field: RecordField,
    outer: Tensor,
    inner: Tensor,
    *,
    eps: float,
) -> None:
    """Rows to a cache: ``rms_norm``, ``rotate``, ``pack_rows``, ``store_rows`` (kernels.md 4).

    Args:
        x: ``[m, n]`` activations, not normalised.
        weight: ``[n]`` wide.
        cos: ``[m, r / 2]`` float32.
        sin: ``[m, r / 2]`` float32.
        field: pages or rings.
        outer: ``[m]`` int64 page ids or slots; rows where it is negative are not stored.
        inner: ``[m]`` int64 entries of the page or rows of the ring; no address may come twice.
        eps: of the norm.
    """
    stored = (outer >= 0).nonzero().squeeze(1)
    values, scales = pack_rows(
        rotate(rms_norm(x, weight, eps=eps), cos, sin), field.record, field.rotary
    )
    store_rows(field, outer[stored], inner[stored], values, scales, rows=stored)


@op()
def norm_query_store_window(
    down: Tensor,
    query_weight: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: RecordField,
    outer: Tensor,
    inner: Tensor,
    *,
    eps: float,
) -> Tensor:
    """Both halves of a down-projection: the query normalised, the rest stored (kernels.md 4).

    Args:
        down: ``[m, q_lora_rank + d]`` activations, the query's part first.
        query_weight: ``[q_lora_rank]`` wide.
        weight: ``[d]`` wide; it and what follows as in ``norm_rotate_store`` of the second part.
        cos: ``[m, r / 2]`` float32.
        sin: ``[m, r / 2]`` float32.
        window: rings, and room for staged rows behind them.
        outer: ``[m]`` int64, negative where nothing is stored.
        inner: ``[m]`` int64.
        eps: of both norms.

    Returns:
        ``[m, q_lora_rank]`` activations.
    """
    rank = query_weight.shape[0]
    norm_rotate_store(down[:, rank:], weight, cos, sin, window, outer, inner, eps=eps)
    return rms_norm(down[:, :rank], query_weight, eps=eps)
