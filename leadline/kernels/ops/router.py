"""Which experts a token goes to."""

from __future__ import annotations

from torch import Tensor

from leadline.kernels.reference import router
from leadline.kernels.registry import op


@op()
def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    req_of_row: Tensor | None = None,
    image_rows: Tensor | None = None,
    image_bias: Tensor | None = None,
    *,
    num_experts_per_tok: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Experts of each row and their weights (5.1); of equal ones the lower id (kernels.md 2).

    Args:
        x: ``[m, D]`` activations.
        gate: ``[E, D]`` activations or wide; the product is wide.
        bias: ``[E]`` wide; selects only.
        req_of_row: ``[m]`` int64, group of each row; -1 for padding, which chooses nobody. None
            where no row is padding.
        image_rows: ``[m]`` bool, tokens of images; None where all are of text.
        image_bias: ``[E]`` wide, ``bias_vl``: selects in place of ``bias`` there. Comes with
            ``image_rows``.
        num_experts_per_tok: experts of a row.
        scale: ``routed_scaling_factor``.

    Returns:
        ``[m, k]`` int64 expert ids, ascending, or -1 of padding; and ``[m, k]`` wide weights.
    """
    return router.route(
        x,
        gate,
        bias,
        req_of_row,
        image_rows,
        image_bias,
        num_experts_per_tok=num_experts_per_tok,
        scale=scale,
    )


@op()
def hash_route(
    x: Tensor,
    gate: Tensor,
    tid2eid: Tensor,
    token_ids: Tensor,
    req_of_row: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``route`` where the token says which experts, as V4's first layers have it (kernels.md 2).

    Args:
        x: ``[m, D]`` activations.
        gate: ``[E, D]`` activations or wide; the product is wide.
        tid2eid: ``[V, k]`` int32 or int64, k different experts of each token id, in any order.
        token_ids: ``[m]`` int32 or int64; below V, those of padding too.
        req_of_row: as in ``route``.
        scale: ``routed_scaling_factor``.

    Returns:
        As ``route``: the table's ids, ascending, and their weights.
    """
    return router.hash_route(x, gate, tid2eid, token_ids, req_of_row, scale=scale)
