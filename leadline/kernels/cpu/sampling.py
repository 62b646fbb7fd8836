"""Ranks of tokens, and the best of rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leadline.kernels.cpu.jit import F2, I1, I2, in_float32, kernel
from leadline.kernels.reference import sampling

_MOST = 32  # of the best, kept sorted by insertion


@in_float32(sampling.logprobs)
def logprobs(
    logits_RV: Tensor, token_R: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values are torch's; ranks and the best are found in one pass, if these are few."""
    if count > _MOST:
        return sampling.logprobs(logits_RV, token_R, count)
    rank = np.empty(len(logits_RV), np.int64)
    best = np.empty((len(logits_RV), count), np.int64)
    _rank(logits_RV, token_R, rank, best)
    values_RV, best_RN = logits_RV.double().log_softmax(-1), torch.from_numpy(best)
    return (
        values_RV.gather(-1, token_R[:, None])[:, 0],
        torch.from_numpy(rank),
        values_RV.gather(-1, best_RN),
        best_RN,
    )


@kernel
def _rank(logits: F2, tokens: I1, rank: I1, best: I2) -> None:
    rows, vocab = logits.shape
    count = best.shape[1]
    for r in range(rows):
        token, row, first = tokens[r], logits[r], best[r]
        ahead, kept = 0, 0
        for i in range(vocab):
            x = row[i]
            ahead += x > row[token] or (x == row[token] and i < token)
            if kept < count or (count > 0 and x > row[first[count - 1]]):
                kept = min(kept + 1, count)
                place = kept - 1
                while place > 0 and x > row[first[place - 1]]:  # equals stay where they are
                    first[place] = first[place - 1]
                    place -= 1
                first[place] = i
        rank[r] = 1 + ahead
