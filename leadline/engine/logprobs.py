"""Log-probabilities of tokens by the model's own logits (serving-api 9.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leadline.core.request import TokenLogprobs


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """One entry per row.

    Args:
        logits: ``[R, V]``, before temperature and masks. Copied in float64, so callers keep R
            small.
        token_ids: the token of each row.
        counts: rivals wanted of each row; -1 is the whole vocabulary.
    """
    size = logits.shape[1]
    values = logits.double().log_softmax(-1)
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = values.gather(1, ids)
    # Of equal values the smaller id ranks first, as greedy picks it.
    ties_before = (values == chosen) & (torch.arange(size, device=logits.device) < ids)
    ranks = 1 + ((values > chosen) | ties_before).sum(-1)
    wanted = [size if count < 0 else min(count, size) for count in counts]
    top, top_ids = values.topk(max(wanted))
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(row_ids[:n], row_top[:n], strict=True)))
        for token_id, logprob, rank, row_ids, row_top, n in zip(
            token_ids,
            chosen[:, 0].tolist(),
            ranks.tolist(),
            top_ids.tolist(),
            top.tolist(),
            wanted,
            strict=True,
        )
    ]
