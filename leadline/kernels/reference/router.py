"""Which experts a token goes to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.kernels.reference.accumulate import widen


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
    """The bias decides who is picked, never how much they count."""
    scores = _scores(x, gate)
    if image_rows is not None and image_bias is not None:
        bias = torch.where(image_rows.unsqueeze(1), image_bias, bias)
    # Sorted, since topk does not promise which of two equal scores it takes.
    best = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    return _weigh(scores, best[..., :num_experts_per_tok], req_of_row, scale)


def hash_route(
    x: Tensor,
    gate: Tensor,
    tid2eid: Tensor,
    token_ids: Tensor,
    req_of_row: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The table decides who is picked; they count as if they had been chosen."""
    return _weigh(_scores(x, gate), tid2eid[token_ids].long(), req_of_row, scale)


def _scores(x: Tensor, gate: Tensor) -> Tensor:
    """``[m, E]`` wide."""
    wide = widen(x)
    return F.softplus(F.linear(wide, gate.to(wide.dtype))).sqrt()


def _weigh(
    scores: Tensor, experts: Tensor, req_of_row: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """These experts in ascending order, in which outputs are summed, and their weights."""
    experts = experts.sort(dim=-1).values
    weights = scores.gather(-1, experts)
    if experts.shape[-1] > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if req_of_row is not None:
        experts = experts.masked_fill(req_of_row.unsqueeze(1) < 0, -1)
    return experts, weights * scale
