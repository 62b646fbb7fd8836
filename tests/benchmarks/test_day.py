"""A simulated day of agents on the fake model: nothing is lost, and caching saves rows."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.day import MODES, SHORT, Shape, fake_day, make_sessions
from leadline.cache.refusals import Refusals

# ``fake_day`` proves the books at every idle moment and at the end, and fails on any lost page,
# slot or window row.


def short_day(mode: str) -> dict[str, Any]:
    return fake_day(mode, SHORT, sessions=20, seed=1, divisor=8)


@pytest.fixture(scope="module")
def days() -> dict[str, dict[str, Any]]:
    return {mode: short_day(mode) for mode in MODES}


def check(days: dict[str, dict[str, Any]], sessions: int) -> None:
    for mode, day in days.items():
        assert day["sessions"] == sessions, mode
        assert day["idle_moments"] > 0, mode
        assert day["text_digest"] == days["off"]["text_digest"], mode
        assert day["evicted_pages"] > 0 or mode == "off", mode
    assert days["off"]["prefix_cache_hits"] == days["off"]["replayed_tokens"] == 0
    for mode in ("bounded", "exact"):
        assert days[mode]["prefix_cache_hits"] > 0
        assert days[mode]["computed_tokens"] < days["off"]["computed_tokens"]
    assert days["exact"]["replayed_tokens"] == 0 < days["bounded"]["replayed_tokens"]
    assert days["bounded"]["upper_rows"] < days["exact"]["upper_rows"]


def test_a_short_day_loses_nothing_and_computes_less(days: dict[str, dict[str, Any]]) -> None:
    check(days, 20)


def test_every_prompt_token_was_found_or_computed(days: dict[str, dict[str, Any]]) -> None:
    for day in days.values():
        found_or_computed = day["computed_tokens"] + day["prefix_cache_hits"]
        if day["num_preemptions"]:  # what is computed again counts again
            assert found_or_computed > day["prompt_tokens"]
        else:
            assert found_or_computed == day["prompt_tokens"]


def test_the_short_day_preempts(days: dict[str, dict[str, Any]]) -> None:
    assert days["bounded"]["num_preemptions"] > 0
    assert days["off"]["num_preemptions"] > 0


def test_a_day_of_the_same_seed_is_the_same(days: dict[str, dict[str, Any]]) -> None:
    assert short_day("bounded") == days["bounded"]


@pytest.mark.parametrize("mode", MODES)
def test_looking_refused_requests_up_in_every_step_plans_the_same(
    mode: str, days: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Refusals, "needed", lambda *_: 0)
    assert short_day(mode) == days[mode]


def test_more_sessions_leave_the_first_ones_as_they_are() -> None:
    few, more = (make_sessions(n, SHORT, vocab_size=100, seed=3) for n in (2, 4))
    assert more[:2] == few
    assert make_sessions(2, SHORT, vocab_size=100, seed=4) != few


@pytest.mark.slow
def test_a_whole_day_loses_nothing_and_computes_less() -> None:
    check({mode: fake_day(mode, Shape(), sessions=200, seed=0) for mode in MODES}, 200)
