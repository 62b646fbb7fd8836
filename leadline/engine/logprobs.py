"""Log-probabilities of tokens by the model's own logits (serving-api 9.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leadline.core.request import TokenLogprobs
from leadline.kernels import ops


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """One entry per row.

    Args:
        logits: ``[R, V]``, before temperature and masks. The definition makes copies in float64,
            so callers keep R small.
        token_ids: the token of each row.
        counts: rivals wanted of each row; -1 is the whole vocabulary.
    """
    size = logits.shape[1]
    wanted = [size if count < 0 else min(count, size) for count in counts]
    most = max(wanted)
    token = torch.tensor(token_ids, device=logits.device)
    logprob, rank, top, top_ids = ops.logprobs(logits, token, most)
    # One copy to the host: float64 holds ids and ranks as they are.
    rows = torch.cat([logprob[:, None], rank[:, None], top, top_ids], dim=1).tolist()
    return [
        TokenLogprobs(
            token_id,
            value,
            int(place),
            tuple(zip(map(int, best[most : most + n]), best[:n], strict=True)),
        )
        for token_id, n, (value, place, *best) in zip(token_ids, wanted, rows, strict=True)
    ]
