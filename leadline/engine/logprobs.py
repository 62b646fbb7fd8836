"""Log-probabilities of tokens by the model's own logits (serving-api 9.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from leadline.core.request import TokenLogprobs
from leadline.kernels import ops
from leadline.kernels.transfer import Download, upload


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """One entry per row, of tokens that the host knows; arguments as in ``launch_logprobs``."""
    return launch_logprobs(logits, upload(token_ids, logits.device), counts)()


def launch_logprobs(
    logits: Tensor, token_ids: Tensor, counts: Sequence[int]
) -> Callable[[], list[TokenLogprobs]]:
    """Compute log-probabilities of tokens and of their rivals, without waiting for them.

    Args:
        logits: ``[R, V]``, before temperature and masks. The definition makes copies in float64,
            so callers keep R small.
        token_ids: ``[R]`` int64, the token of each row.
        counts: rivals wanted of each row; -1 is the whole vocabulary.

    Returns:
        What waits, and gives one entry per row.
    """
    size = logits.shape[1]
    wanted = [size if count < 0 else min(count, size) for count in counts]
    most = max(wanted)
    logprob, rank, top, top_ids = ops.logprobs(logits, token_ids, most)
    # One copy: float64 holds ids and ranks as they are.
    columns = (token_ids[:, None], logprob[:, None], rank[:, None], top_ids, top)
    numbers = Download(torch.cat(columns, dim=1))

    def finish() -> list[TokenLogprobs]:
        rows = numbers.wait().tolist()
        return [
            TokenLogprobs(
                int(row[0]),
                row[1],
                int(row[2]),
                tuple(zip(map(int, row[3 : 3 + n]), row[3 + most : 3 + most + n], strict=True)),
            )
            for row, n in zip(rows, wanted, strict=True)
        ]

    return finish
