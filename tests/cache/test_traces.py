"""Any order of calls: the cache manager against the brute-force model of ``cache_model``."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cache.cache_model import CacheModel

COUNT = st.integers(0, 7)


class CacheAgainstModel(RuleBasedStateMachine):
    """For short counterexamples; ``test_random_traces`` has the numbers."""

    model: CacheModel

    @initialize(exact=st.booleans(), num_pages=st.integers(4, 10), hot_slots=st.integers(0, 2))
    def start(self, exact: bool, num_pages: int, hot_slots: int) -> None:
        self.model = CacheModel(num_pages=num_pages, num_slots=3, exact=exact, hot_slots=hot_slots)

    @rule(
        base=COUNT,
        cut=COUNT,
        new=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        salt=st.integers(0, 1),
        session=st.integers(0, 2),
    )
    def arrive(self, base: int, cut: int, new: list[int], salt: int, session: int) -> None:
        self.model.arrive(base, cut, new, salt, session)

    @precondition(lambda self: self.model.waiting)
    @rule(which=COUNT)
    def admit(self, which: int) -> None:
        self.model.admit(which)

    @precondition(lambda self: self.model.running)
    @rule(
        which=COUNT,
        num_rows=st.integers(1, 9),
        num_drafts=st.integers(0, 4),
        token=st.integers(0, 1),
        kind=st.integers(0, 4),
        lags=st.booleans(),
    )
    def step(
        self, which: int, num_rows: int, num_drafts: int, token: int, kind: int, lags: bool
    ) -> None:
        self.model.step(which, num_rows, num_drafts, token, kind, lags=lags)

    @precondition(lambda self: self.model.running)
    @rule(which=COUNT)
    def finish(self, which: int) -> None:
        self.model.finish(which)

    @precondition(lambda self: self.model.running)
    @rule(which=COUNT)
    def preempt(self, which: int) -> None:
        self.model.preempt(which)

    @precondition(lambda self: self.model.waiting)
    @rule(which=COUNT)
    def abort_waiting(self, which: int) -> None:
        self.model.abort_waiting(which)

    @rule()
    def reset(self) -> None:
        self.model.reset()

    @invariant()
    def agrees(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.finish_all()


TestCacheAgainstModel = CacheAgainstModel.TestCase
TestCacheAgainstModel.settings = settings(max_examples=100, stateful_step_count=30)


def run_trace(seed: int) -> Counter[str]:
    """Sixty operations, mostly steps and admissions; says what they have reached."""
    draw = random.Random(seed)
    model = CacheModel(
        num_pages=draw.randint(4, 12),
        num_slots=draw.randint(1, 4),
        exact=draw.random() < 0.5,
        hot_slots=draw.choice([0, 0, 1, 2]),
    )
    for _ in range(60):
        which, chance = draw.randrange(8), draw.random()
        if chance < 0.25 or not (model.waiting or model.running):
            new = [draw.randrange(2) for _ in range(draw.randint(1, 6))]
            cut = draw.choice([0, 0, 0, 1, 5])
            model.arrive(-which, cut, new, int(draw.random() < 0.2), draw.randrange(3))
        elif model.waiting and chance < 0.5:
            model.admit(which)
        elif model.running and chance < 0.85:
            model.step(
                which,
                num_rows=draw.choice([1, 2, 4, 4, 9]),
                num_drafts=draw.randint(0, 4),
                token=draw.randrange(2),
                kind=draw.randrange(5),
                lags=draw.random() < 0.3,
            )
        elif model.running and chance < 0.95:
            model.finish(which)
        elif model.running and chance < 0.98:
            model.preempt(which)
        elif model.waiting and chance < 0.99:
            model.abort_waiting(which)
        elif chance >= 0.99:
            model.reset()
        model.check()
    model.finish_all()
    return model.seen


@pytest.mark.parametrize("first", range(0, 2000, 500), ids=lambda first: f"from seed {first}")
def test_random_traces(first: int) -> None:
    seen = sum((run_trace(seed) for seed in range(first, first + 500)), Counter[str]())
    rare = {
        what for what in ("hit", "hot", "snapshot", "eviction", "preemption") if seen[what] < 50
    }
    assert not rare, f"traces hardly reach {rare}: {seen}"
