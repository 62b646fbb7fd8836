"""Log-probabilities: the very ids, ranks and values of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cpu.conftest import Both

VOCAB = 150


def assert_same(both: Both, logits: Tensor, count: int) -> None:
    tokens = torch.randint(VOCAB, (len(logits),))
    for fast, wanted in zip(*both("logprobs", logits, tokens, count), strict=True):
        assert fast.dtype == wanted.dtype
        assert torch.equal(fast, wanted)


@pytest.mark.parametrize("count", [0, 1, 7, 32, 33, VOCAB])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_any_number_of_the_best(both: Both, rows: int, count: int) -> None:
    assert_same(both, torch.randn(rows, VOCAB), count)


def test_equal_and_masked_logits(both: Both) -> None:
    """Integers, zeros of both signs, rows of one value, fewer finite logits than are wanted."""
    logits = torch.randn(5, VOCAB).round()
    logits[1, ::2] = -torch.inf
    logits[2] = 3.0
    logits[3] = torch.tensor([0.0, -0.0]).repeat(VOCAB // 2)
    logits[4, 2:] = -torch.inf
    assert_same(both, logits, 20)


def test_logits_in_steps_and_in_float64(both: Both) -> None:
    assert_same(both, torch.randn(VOCAB, 3).T, 5)
    assert_same(both, torch.randn(3, VOCAB, dtype=torch.float64), 5)


def test_rows_without_a_distribution_have_none(both: Both) -> None:
    logits = torch.randn(4, VOCAB)
    logits[0, 7], logits[1, 7] = torch.nan, torch.inf
    logits[2] = -torch.inf
    fast, wanted = both("logprobs", logits, torch.tensor([7, 7, 7, 7]), 3)
    logprob, rank, top, ids = fast
    assert torch.equal(logprob.isnan(), wanted[0].isnan())
    assert torch.equal(top.isnan(), wanted[2].isnan())
    assert bool(((rank >= 1) & (rank <= VOCAB)).all())
    assert bool(((ids >= 0) & (ids < VOCAB)).all())
    assert rank[3] == wanted[1][3]
