"""Replay with the full halo, ``window - 1`` rows a layer, is exact: the oracle (3.9)."""

from __future__ import annotations

import pytest

from tests.replay.harness import (
    FULL_HALO,
    Answer,
    Service,
    assert_same,
    bounded,
    exact,
    tiny_model,
    tokens_of,
)

LENGTHS = (40, 57, 80, 81, 150)  # below the halo, and above it with and without a tail


def two_turns(service: Service) -> list[list[Answer]]:
    """Cold, sent again, and the next turn, whose hits hold decoded tokens."""
    prompts = [tokens_of(n, seed=n) for n in LENGTHS]
    cold = service.ask(*prompts, max_tokens=12)
    again = service.ask(*prompts)
    turns = service.ask(*(a.text + tokens_of(n, seed=1) for n, a in enumerate(cold, start=1)))
    return [cold, again, turns]


@pytest.fixture(scope="module")
def without_replay() -> list[list[Answer]]:
    return two_turns(exact(tiny_model(), caching=False))


@pytest.mark.parametrize("chunk", [None, 9])
def test_the_full_halo_equals_no_replay_cold_and_warm(
    chunk: int | None, without_replay: list[list[Answer]]
) -> None:
    rounds = two_turns(bounded(tiny_model(), length=FULL_HALO, chunk=chunk))
    for got, want in zip(rounds, without_replay, strict=True):
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
    _, again, turns = rounds
    assert [a.replayed for a in again] == [32, 48, 56, 56, 56]
    assert [a.cached for a in turns] == [48, 64, 80, 80, 160]


def test_a_halo_of_one_row_less_a_layer_is_not_exact(without_replay: list[list[Answer]]) -> None:
    """So the tokens above are equal because of the halo, and not because nothing reads it."""
    rounds = two_turns(bounded(tiny_model(), length=FULL_HALO - 8))
    differences = [
        (one.rows[0] - other.rows[0]).abs().max()
        for got, want in zip(rounds[1:], without_replay[1:], strict=True)
        for one, other in zip(got, want, strict=True)
    ]
    assert max(differences) > 1e-6
