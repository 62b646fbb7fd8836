"""Bounded replay on a real model: cache-and-scheduling 7, 19 to 24 and 26 to 31."""

from __future__ import annotations

import pytest

from tests.replay.harness import (
    EXACT,
    PAGE,
    WINDOW,
    Answer,
    Service,
    assert_same,
    bounded,
    exact,
    tiny_model,
    tokens_of,
)
from tests.replay.reference import replay_logprobs

CHUNKS = (1, 3, 64, 256, 1000)
# (H, E): whole prompts found; tails shorter than a window, of one, longer; several pages.
HITS = [(16, 16), (48, 48), (16, 17), (48, 51), (80, 87), (80, 88), (48, 57), (80, 120)]


def ask_warm(service: Service, hits: list[tuple[int, int]]) -> list[Answer]:
    """Let the cache know ``hit`` tokens of a text each, then ask for its first ``end``."""
    for i, (hit, end) in enumerate(hits):
        service.add(f"cold {i}", warm_prompt(hit, end)[:hit] + [5], 1)
    service.run()
    answers = [service.add(f"warm {i}", warm_prompt(*pair)) for i, pair in enumerate(hits)]
    service.run()
    return answers


def warm_prompt(hit: int, end: int) -> list[int]:
    return tokens_of(end, seed=1000 * hit + end)


@pytest.fixture(scope="module")
def warm() -> list[Answer]:
    return ask_warm(bounded(tiny_model()), HITS)


def test_19_replay_equals_one_forward_with_an_explicit_mask(warm: list[Answer]) -> None:
    for (hit, end), answer in zip(HITS, warm, strict=True):
        assert (answer.cached, answer.replayed) == (min(hit, end - 1), WINDOW)
        want = replay_logprobs(tiny_model(), answer.text[:-1], hit=hit, prefill_end=end)
        EXACT(answer.logprobs, want)


@pytest.mark.parametrize("chunk", CHUNKS[:3])
@pytest.mark.parametrize("budget", [10, 2048], ids=["tight_steps", "wide_steps"])
def test_19_replay_does_not_depend_on_its_chunks(
    chunk: int, budget: int, warm: list[Answer]
) -> None:
    service = bounded(tiny_model(), chunk=chunk, max_num_batched_tokens=budget)
    for got, want in zip(ask_warm(service, HITS), warm, strict=True):
        assert_same(got, want)
