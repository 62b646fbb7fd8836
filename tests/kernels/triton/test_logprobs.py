"""Log-probabilities against their definition: ids and ranks are the same, values within 2e-6."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.kernels.reference import sampling as reference
from leadline.kernels.triton import logprobs

VOCAB = 1300  # three tiles, the last one partial, as is its last group
TOLERANCE = 2e-6


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_TILE", 512)
    monkeypatch.setattr(logprobs, "_GROUP", 8)


def assert_close(logits: Tensor, tokens: list[int], count: int, device: torch.device) -> Tensor:
    """The ids of the best."""
    arguments = (logits.to(device), torch.tensor(tokens, device=device), count)
    logprob, rank, top, ids = logprobs.logprobs(*arguments)
    expected = reference.logprobs(*arguments)
    assert torch.equal(rank, expected[1])
    assert torch.equal(ids, expected[3])
    for actual, wanted in ((logprob, expected[0]), (top, expected[2])):
        assert actual.dtype == torch.float64
        torch.testing.assert_close(actual, wanted, rtol=0, atol=TOLERANCE, equal_nan=True)
    return ids


@pytest.mark.parametrize("count", [0, 1, 5, 20, 32])
def test_any_number_of_the_best(device: torch.device, count: int) -> None:
    logits = 4 * torch.randn(2, VOCAB)
    ids = assert_close(logits, [int(logits[0].argmax()), VOCAB - 1], count, device)
    assert ids.shape == (2, count)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 1e3])
def test_flat_and_steep_rows(device: torch.device, spread: float) -> None:
    assert_close(17 + spread * torch.randn(2, VOCAB), [0, 700], 3, device)


@pytest.mark.parametrize("first", [0, 509, 1292])
def test_the_best_are_neighbours(device: torch.device, first: int) -> None:
    """All in one group, or on both sides of a border."""
    logits = torch.randn(1, VOCAB)
    logits[0, first : first + 8] += 20
    assert_close(logits, [first + 3], 8, device)


def test_of_equals_smaller_ids_stand_first(device: torch.device) -> None:
    """Zeros of both signs, over several tiles; a row of nothing else; integers."""
    logits = torch.full((3, VOCAB), -8.0)
    logits[0, torch.arange(10) * 129] = torch.tensor([0.0, -0.0]).repeat(5)
    logits[1] = 1.0
    logits[2] = torch.randn(VOCAB).round()
    ids = assert_close(logits, [129 * 7, 900, 1100], 7, device)
    assert ids[0].tolist() == [129 * n for n in range(7)]
    assert ids[1].tolist() == list(range(7))


def test_masked_ids_are_impossible(device: torch.device) -> None:
    """Fewer finite logits than are wanted: -inf follows, in the order of ids; so does a token."""
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[0, [900, 5]] = torch.tensor([1.0, 2.0])
    logits[1, 1299] = -3.0
    ids = assert_close(logits, [900, 4], 5, device)
    assert ids.tolist() == [[5, 900, 0, 1, 2], [1299, 0, 1, 2, 3]]


def test_broken_rows_stay_alone(device: torch.device) -> None:
    """Without a valid distribution all is NaN, and ids are ids."""
    logits = 3 * torch.randn(5, VOCAB)
    tokens = [3, 1234, 3, 0, 8]
    logits[1, 1234], logits[2, 700] = torch.nan, torch.inf
    logits[3] = -torch.inf
    logits[4] = torch.nan
    found = logprobs.logprobs(logits.to(device), torch.tensor(tokens, device=device), 4)
    for alone, together in zip(
        logprobs.logprobs(logits[:1].to(device), torch.tensor([3], device=device), 4),
        found,
        strict=True,
    ):
        assert torch.equal(alone[0], together[0])
    logprob, rank, top, ids = found
    assert logprob.isnan().tolist() == [False, True, True, True, True]
    assert bool(top[1:].isnan().all())
    assert bool(((rank >= 1) & (rank <= VOCAB)).all())
    assert all(len(set(row)) == 4 and 0 <= min(row) <= max(row) < VOCAB for row in ids.tolist())


@pytest.mark.parametrize("vocab", [1, 8, 512, 513])
def test_small_vocabularies(device: torch.device, vocab: int) -> None:
    assert_close(torch.randn(2, vocab), [0, vocab - 1], min(vocab, 5), device)
    assert_close(torch.randn(1, vocab), [0], 0, device)


def test_rows_that_are_not_contiguous(device: torch.device) -> None:
    assert_close(torch.randn(VOCAB, 2).T, [5, 6], 2, device)


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 100), (torch.float64, 5)])
def test_the_rest_takes_the_definition(
    device: torch.device, dtype: torch.dtype, count: int
) -> None:
    assert_close(torch.randn(2, VOCAB, dtype=dtype), [7, 9], count, device)


def test_no_rows(device: torch.device) -> None:
    empty = torch.empty(0, 100, device=device)
    token = torch.empty(0, dtype=torch.int64, device=device)
    shapes = [tuple(found.shape) for found in logprobs.logprobs(empty, token, 3)]
    assert shapes == [(0,), (0,), (0, 3), (0, 3)]
