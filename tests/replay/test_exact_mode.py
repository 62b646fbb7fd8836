"""Exact mode: caching changes no token and no logit (cache-and-scheduling 7, 9; 2.8, 3.10)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain

import pytest
import torch

from leadline.cache.pool import CachePool
from leadline.models.deepseek_v41.model import DeepseekV41
from tests.replay.harness import (
    MODELS,
    Answer,
    Service,
    assert_same,
    exact,
    tiny_model,
    tiny_v4_model,
    tokens_of,
)

CHUNKS = (1, 3, 64, 256, 1000)


def lengths_around(page: int) -> list[int]:
    """The lengths of invariant 9, and one whose answer of 12 tokens crosses a page border."""
    return [1, page - 1, page, page + 1, 2 * page, 2 * page + 1, 3 * page + 5]


def play(service: Service, page: int) -> list[list[Answer]]:
    """Sessions side by side: cold, sent again, their next turns, and two forks of the longest."""
    prompts = [tokens_of(n, seed=n) for n in lengths_around(page)]
    cold = service.ask(*prompts, max_tokens=12)
    again = service.ask(*prompts, max_tokens=3)
    turns = service.ask(*(a.text + tokens_of(5, seed=i) for i, a in enumerate(cold)), max_tokens=3)
    forks = [
        service.ask(prompts[-1][: 2 * page + 3] + tokens_of(page, seed), max_tokens=3)
        for seed in (1001, 1002)
    ]
    return [cold, again, turns, *forks]


@functools.cache
def without_caching(model: str, page: int) -> list[list[Answer]]:
    """Every prompt from its first token, each in one chunk."""
    return play(exact(MODELS[model](), caching=False, page_size=page), page)


def assert_caching_changes_nothing(model: str, page: int, chunk: int) -> None:
    budget = max(chunk, 10)  # a row for every neighbour
    service = exact(MODELS[model](), page_size=page, chunk=chunk, max_num_batched_tokens=budget)
    rounds = play(service, page)
    for got, want in zip(rounds, without_caching(model, page), strict=True):
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
    cold, again, turns, first_fork, second_fork = (
        [answer.cached for answer in answers] for answers in rounds
    )
    assert cold == [0] * 7
    # The end of a prompt: its last border below the last token.
    assert again == [0, 0, 0, page, page, 2 * page, 3 * page]
    # The end of a turn: the last border that the answer crossed.
    assert turns == [(n + 11) // page * page for n in lengths_around(page)]
    # A junction: found by the first fork, used by the second.
    assert (first_fork, second_fork) == ([0], [2 * page])


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("model", MODELS)
def test_caching_changes_no_token_and_no_logit(model: str, chunk: int) -> None:
    assert_caching_changes_nothing(model, 16, chunk)


@pytest.mark.parametrize("group", ["open_groups", "open_index_groups"])
def test_without_the_open_rows_of_a_snapshot_a_v4_answers_otherwise(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a border the last group is pooled once more, with the next: all else is in pages and
    windows.
    """
    copy_slots = CachePool.copy_slots

    def lossy(self: CachePool, pairs: Sequence[tuple[int, int]]) -> None:
        copy_slots(self, pairs)
        for _, target in pairs:
            for rows in getattr(self, group).values():
                rows[target : target + 1] = 0

    monkeypatch.setattr(CachePool, "copy_slots", lossy)
    prompts = [tokens_of(3 * 16 + 5, seed) for seed in range(4)]
    service = exact(tiny_v4_model())
    wanted, found = (service.ask(*prompts, max_tokens=8) for _ in range(2))
    assert all(answer.cached == 48 for answer in found)
    deviations = [
        (got.logprobs - want.logprobs).abs().max() for got, want in zip(found, wanted, strict=True)
    ]
    assert max(deviations) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("chunk", CHUNKS[2:])
@pytest.mark.parametrize("model", MODELS)
def test_caching_changes_nothing_with_pages_of_256(model: str, chunk: int) -> None:
    assert_caching_changes_nothing(model, 256, chunk)


def test_a_page_of_256_is_cut_and_found_as_a_small_one() -> None:
    service = exact(tiny_model(), page_size=256, chunk=100)
    plain = exact(tiny_model(), page_size=256, caching=False)
    prompt = tokens_of(257, seed=256)
    for _ in range(2):
        [got], [want] = service.ask(prompt), plain.ask(prompt)
        assert_same(got, want)
    assert got.cached == 256


def assert_decided_tokens_agree(got: Answer, want: Answer, tolerance: float) -> int:
    """Greedy tokens agree wherever the best logit leads by more; how many were compared."""
    for i, (token, wanted) in enumerate(zip(got.tokens, want.tokens, strict=True)):
        best, second = want.rows[i].topk(2).values.tolist()
        if token != wanted:
            assert best - second <= tolerance, f"token {i} leads by {best - second}"
            return i  # from here on the texts differ
        torch.testing.assert_close(got.rows[i], want.rows[i], rtol=0.0, atol=tolerance)
    return len(want.tokens)


@functools.cache
def float32_model(*, quantized: bool) -> DeepseekV41:
    return tiny_model(dtype=torch.float32, quantized=quantized)


@pytest.mark.parametrize(
    ("quantized", "tolerance"),
    # The logits' standard deviation is 3.9. A code on the other side of a rounding point moves a
    # logit by up to 0.25; without such points there is the order of additions alone.
    [(False, 1e-3), (True, 0.5)],
    ids=["no_rounding_points", "packed_formats"],
)
def test_in_float32_every_decided_token_stays(quantized: bool, tolerance: float) -> None:
    model, kv_cache_dtype = float32_model(quantized=quantized), "auto" if quantized else "float32"
    want = play(exact(model, caching=False, kv_cache_dtype=kv_cache_dtype), 16)
    got = play(exact(model, chunk=7, kv_cache_dtype=kv_cache_dtype), 16)
    pairs = list(zip(chain(*got), chain(*want), strict=True))
    assert sum(one.cached for one, _ in pairs) > 200
    compared = sum(assert_decided_tokens_agree(*pair, tolerance) for pair in pairs)
    assert compared > 0.9 * sum(len(want.tokens) for _, want in pairs)
