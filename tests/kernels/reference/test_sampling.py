"""Log-probabilities by their definition, one id after the other."""

from __future__ import annotations

import math

import pytest
import torch

from leadline.kernels.reference import sampling


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [0, 1, 9, 40])
def test_best_first_and_of_equals_the_smaller_id(dtype: torch.dtype, count: int) -> None:
    """Integers, so that many are equal, also at the end of the list; some ids are masked."""
    logits = torch.randn(6, 40, dtype=dtype).mul(2).round()
    logits[:, ::7] = -torch.inf
    tokens = [0, 39, 8, 14, 3, 30]
    logprob, rank, top, ids = sampling.logprobs(logits, torch.tensor(tokens), count)
    for row, token in enumerate(tokens):
        values = logits[row].tolist()
        total = math.log(math.fsum(math.exp(value) for value in values))
        order = sorted(range(40), key=lambda i: (-values[i], i))
        assert logprob[row].item() == pytest.approx(values[token] - total, abs=1e-12)
        assert rank[row] == 1 + order.index(token)
        assert ids[row].tolist() == order[:count]
        expected = [values[i] - total for i in order[:count]]
        assert top[row].tolist() == pytest.approx(expected, abs=1e-12)


def test_rows_without_a_distribution_have_none() -> None:
    logits = torch.randn(4, 40)
    logits[0, 7], logits[1, 7] = torch.nan, torch.inf
    logits[2] = -torch.inf
    logprob, rank, top, ids = sampling.logprobs(logits, torch.tensor([7, 7, 7, 7]), 3)
    assert logprob.isnan().tolist() == [True, True, True, False]
    assert top.isnan().all(-1).tolist() == [True, True, True, False]
    assert bool(((rank >= 1) & (rank <= 40)).all())
    assert bool(((ids >= 0) & (ids < 40)).all())
