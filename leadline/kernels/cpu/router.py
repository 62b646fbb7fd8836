"""Which experts a token goes to."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.kernels.cpu.jit import F2, I1, I2, Real, in_float32, inline, kernel
from leadline.kernels.reference import router


@inline
def _score(x: Real) -> Real:
    """The root of softplus, which beyond 20 is the identity, as torch has it."""
    return math.sqrt(x if x > 20 else math.log1p(math.exp(x)))


@in_float32(router.route)
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
    """The product is torch's, everything behind it one pass."""
    ids = np.empty((x.shape[0], num_experts_per_tok), np.int64)
    weights = np.empty(ids.shape, np.float32)
    groups = np.zeros(len(ids), np.int64) if req_of_row is None else req_of_row
    if image_rows is None or image_bias is None:
        biases, which = bias.unsqueeze(0), np.zeros(len(ids), np.int64)
    else:
        biases, which = torch.stack((bias, image_bias)), image_rows.long().numpy()
    _route(F.linear(x, gate), biases, which, groups, scale, ids, weights)
    return torch.from_numpy(ids), torch.from_numpy(weights)


@in_float32(router.hash_route)
def hash_route(
    x: Tensor,
    gate: Tensor,
    tid2eid: Tensor,
    token_ids: Tensor,
    req_of_row: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As ``route``, with the choices of a table."""
    ids = tid2eid[token_ids].long()
    weights = np.empty(ids.shape, np.float32)
    groups = np.zeros(len(ids), np.int64) if req_of_row is None else req_of_row
    _weigh(F.linear(x, gate), groups, scale, ids, weights)
    return ids, torch.from_numpy(weights)


@kernel
def _weigh(scores: F2, req_of_row: I1, scale: float, ids: I2, weights: F2) -> None:
    rows, k = ids.shape
    for r in range(rows):
        ids[r].sort()  # ascending: the order in which outputs are summed
        total = np.float32(1e-20)
        for j in range(k):
            weights[r, j] = _score(scores[r, ids[r, j]])
            total += weights[r, j]
        for j in range(k):
            weights[r, j] *= scale if k == 1 else scale / total
            if req_of_row[r] < 0:
                ids[r, j] = -1


@kernel
def _route(
    scores: F2, biases: F2, which: I1, req_of_row: I1, scale: float, ids: I2, weights: F2
) -> None:
    rows, experts = scores.shape
    k = ids.shape[1]
    taken = np.empty(experts, np.bool_)
    for r in range(rows):
        bias = biases[which[r]]
        for e in range(experts):
            scores[r, e] = _score(scores[r, e])
            taken[e] = False
        for _ in range(k):
            best = -1
            for e in range(experts):
                if not taken[e] and (
                    best < 0 or scores[r, e] + bias[e] > scores[r, best] + bias[best]
                ):
                    best = e
            taken[best] = True
        total, place = np.float32(1e-20), 0
        for e in range(experts):  # ascending: the order in which outputs are summed
            if taken[e]:
                ids[r, place] = e if req_of_row[r] >= 0 else -1
                weights[r, place] = scores[r, e]
                total += scores[r, e]
                place += 1
        for j in range(k):
            weights[r, j] *= scale if k == 1 else scale / total
