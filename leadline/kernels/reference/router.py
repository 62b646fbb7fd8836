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
    *,
    num_experts_per_tok: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The bias decides who is picked, never how much they count."""
    wide = widen(x)
    scores = F.softplus(F.linear(wide, gate.to(wide.dtype))).sqrt()
    # Sorted, since topk does not promise which of two equal scores it takes.
    best = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    # Ascending: the order in which outputs are summed.
    experts = best[..., :num_experts_per_tok].sort(dim=-1).values
    weights = scores.gather(-1, experts)
    if num_experts_per_tok > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if req_of_row is not None:
        experts = experts.masked_fill(req_of_row.unsqueeze(1) < 0, -1)
    return experts, weights * scale
