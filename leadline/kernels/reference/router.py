"""Which experts a token goes to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.kernels.reference.accumulate import widen


def route(
    x: Tensor, gate: Tensor, bias: Tensor, *, num_experts_per_tok: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The bias decides who is picked, never how much they count."""
    wide = widen(x)
    scores = F.softplus(F.linear(wide, gate.to(wide.dtype))).sqrt()
    chosen = torch.topk(scores + bias, num_experts_per_tok, dim=-1).indices
    experts = chosen.sort(dim=-1).values  # ascending: the order in which outputs are summed
    weights = scores.gather(-1, experts)
    if num_experts_per_tok > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * scale
