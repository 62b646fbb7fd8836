"""Random traces through the whole engine on the fake model, which proves what it reads and writes.

Every plan, page, slot and window row is checked while a trace runs (``tests.checks`` and
``tests.fakes``); here it must end well: each request with the tokens that it gets alone, nothing
leaked, and the counters the sums over the requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from leadline.cache.replay import ReplayPolicy
from leadline.core.request import EngineRequest, FinishReason, TokenOutput
from tests.fakes import FIRST_ID, VOCAB_SIZE, FakeEngine, expected_tokens, fake_engine, request

WINDOW, PAGE = 8, 16

BOUNDED = ReplayPolicy(lower=True, upper=True, length=WINDOW, window=WINDOW)
MODES = {
    "bounded": BOUNDED,
    "halo": replace(BOUNDED, length=3 * WINDOW),
    "lower": replace(BOUNDED, upper=False),
    "upper": replace(BOUNDED, lower=False),
    "exact": replace(BOUNDED, lower=False, upper=False),
    "uncached": replace(BOUNDED, lower=False, upper=False),
}


@dataclass
class Trace:
    """A small cache, tight budgets, and what happens before each step.

    Attributes:
        options: of the engine.
        events: step -> requests that arrive, ids that are aborted, or ``"reset"``.
    """

    options: dict[str, int | float | None]
    snapshot_interval: int = 0
    events: dict[int, list[EngineRequest | str]] = field(default_factory=dict)

    @classmethod
    def random(cls, seed: str) -> Trace:
        """Conversations on a few pages; every fourth trace is a crowd that runs out of them."""
        rng = random.Random(seed)
        is_crowd = rng.random() < 0.25
        num_seqs = rng.randint(3, 4) if is_crowd else rng.choice([1, 2, 3, 3])
        num_pages = rng.randint(5, 8) if is_crowd else rng.randint(5, 14)
        trace = cls(
            {
                "num_pages": num_pages + 1,
                "num_slots": num_seqs + 1,
                "num_snapshots": rng.choice([0, 1, 3, 6]),
                "hot_slots": rng.choice([0, 0, 1, 2]),
                "max_num_batched_tokens": rng.choice([num_seqs + 5, num_seqs + WINDOW, 24, 60]),
                "max_prefill_rows": rng.choice([5, WINDOW, 16, 40]),
                "max_prefills": rng.randint(1, 3),
                "max_bypass": rng.randint(0, 3),
                "long_prefill_threshold": rng.choice([None, None, None, 6, 20]),
            },
            snapshot_interval=rng.choice([0, 2 * PAGE, 100 * PAGE]),
        )
        longest = PAGE * num_pages
        texts: list[list[int]] = []
        arrival = 0
        for i in range(4 if is_crowd else rng.randint(3, 6)):
            text = _text(rng, texts)[: PAGE if is_crowd else longest - 1]
            size = rng.randint(18, 30) if is_crowd else rng.choice([1, 3, rng.randint(1, 14)])
            max_tokens = min(size, longest - len(text))
            texts.append(text + expected_tokens(text, max_tokens))
            turn = replace(
                request(f"r{i}", text, max_tokens),
                priority=rng.choice([0, 0, 1]),
                cache_salt=rng.choice([None, None, None, "salt"]),
                session_key=rng.choice([None, "a", "b"]),
            )
            arrival += rng.choice([0, 0, rng.randint(1, 2 if is_crowd else 12)])
            trace.events.setdefault(arrival, []).append(turn)
            if rng.random() < 0.15:
                trace.events.setdefault(arrival + rng.randint(0, 12), []).append(f"r{i}")
        if rng.random() < 0.2:
            trace.events.setdefault(rng.randint(0, 20), []).append("reset")
        return trace

    @property
    def requests(self) -> list[EngineRequest]:
        every = [event for events in self.events.values() for event in events]
        return [event for event in every if isinstance(event, EngineRequest)]

    def run(self, engine: FakeEngine) -> dict[str, list[TokenOutput]]:
        """Let it all happen; the outputs of each request."""
        outputs: dict[str, list[TokenOutput]] = {r.request_id: [] for r in self.requests}
        step, last = 0, max(self.events)
        indexed: dict[tuple[int, bytes | None], bytes] = {}
        while engine.has_work or step <= last:
            for event in self.events.get(step, ()):
                if isinstance(event, EngineRequest):
                    engine.add(event)
                elif event == "reset":
                    engine.reset_prefix_cache()
                else:
                    engine.abort(event)
            for output in engine.step():
                outputs[output.request_id].append(output)
            indexed = check_indexed_pages(engine, indexed)
            step += 1
        return outputs


def _text(rng: random.Random, texts: list[list[int]]) -> list[int]:
    near_boundary = rng.randint(1, 5) * PAGE + rng.randint(-1, 1)
    size = rng.choice([rng.randint(1, 2 * PAGE), near_boundary])
    new = rng.choices(range(FIRST_ID, VOCAB_SIZE), k=size)
    if not texts or rng.random() < 0.2:
        return new
    text = rng.choice(texts)
    kept = rng.choice([len(text), len(text), rng.randint(1, len(text)), near_boundary])
    return text[:kept] + rng.choice([[], new, new[:3]])


def check_indexed_pages(
    engine: FakeEngine, before: dict[tuple[int, bytes | None], bytes]
) -> dict[tuple[int, bytes | None], bytes]:
    """Invariants 13 and 17: nobody writes an indexed page. What wrote each of them, by digest.

    Without replay a page may be evicted, computed and indexed anew within one step.
    """
    index, written_at = engine.cache._index, engine.model.written_at
    now = {(page, index.digest_of(page)): written_at[page].tobytes() for page in index.pages}
    if not engine.cache.takes_snapshots:
        for key in before.keys() & now.keys():
            assert before[key] == now[key], f"page {key[0]} was written while it was indexed"
    return now


def engine_of(mode: str, trace: Trace, *, asynchronous: bool) -> FakeEngine:
    return fake_engine(
        page_size=PAGE,
        policy=replace(MODES[mode], snapshot_interval=trace.snapshot_interval),
        prefix_caching=mode != "uncached",
        asynchronous=asynchronous,
        priority_aging_seconds=None,
        **trace.options,  # type: ignore[arg-type]
    )


def check_outputs(trace: Trace, outputs: dict[str, list[TokenOutput]]) -> None:
    """Invariants 8, 33, 34 and 35: every request ends, and says what it says alone."""
    for item in trace.requests:
        got = outputs[item.request_id]
        want = expected_tokens(item.prompt_token_ids, item.sampling.max_tokens)
        tokens = [token for output in got for token in output.token_ids]
        assert [output.finish_reason for output in got[:-1]] == [None] * (len(got) - 1)
        if got[-1].finish_reason is FinishReason.ABORT:
            assert tokens == want[: len(tokens)]
        else:
            assert got[-1].finish_reason is FinishReason.LENGTH, got[-1].error
            assert tokens == want


def check_idle(engine: FakeEngine) -> None:
    """Invariant 3: nothing is held once hot slots are dropped, and a reset forgets the rest."""
    engine.check_integrity()
    assert engine.reset_prefix_cache()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_cached_pages) == (0, 0, 0)
    assert (stats.num_free_pages, stats.num_free_slots) == (stats.num_pages, stats.num_slots)
    assert engine.cache.num_snapshots == engine.cache.num_hot_slots == 0


def check_counters(engine: FakeEngine, outputs: Iterable[list[TokenOutput]]) -> None:
    """Invariant 36: what the engine counts is the sum over its rows and its requests."""
    counters = engine.stats().counters
    groups = [group for plan in engine.scheduler.plans for group in plan.groups]
    assert counters["upper_rows"] == sum(group.num_upper for group in groups)
    assert engine.model.num_upper_rows == counters["upper_rows"]
    assert engine.model.num_lower_rows == sum(group.num_rows for group in groups)
    prefill_rows = sum(plan.num_prefill_rows for plan in engine.scheduler.plans)
    assert counters["computed_tokens"] + counters["replayed_tokens"] == prefill_rows
    said = [got[-1].num_cached_tokens for got in outputs]
    assert counters["prompt_tokens_cached"] == sum(said)
    assert counters["prefix_cache_hits"] >= sum(said)


def what_happened(engine: FakeEngine) -> set[str]:
    """Which of the rarer things a trace went through."""
    counters, plans = engine.stats().counters, engine.scheduler.plans
    replays = [sum(g.start < g.request.cached for g in plan.groups) for plan in plans]
    firsts = engine.scheduler.first_fed.items()
    happened = {
        "preempted": counters["num_preemptions"] > 0,
        "hit": counters["prompt_tokens_cached"] > 0,
        "evicted": counters["evicted_pages"] > 0,
        "replayed together": max(replays, default=0) > 1,
        "resumed with a hit": any(generation and first for (_, generation), first in firsts),
        "restored": any(plan.copies_before for plan in plans),
        "saved": any(plan.copies_after for plan in plans),
        "aborted": engine.stats().finished["abort"] > 0,
    }
    return {name for name, is_so in happened.items() if is_so}


REPLAYS = {"preempted", "hit", "evicted", "aborted", "replayed together", "resumed with a hit"}
RESTORES = {"preempted", "hit", "evicted", "aborted", "saved", "restored", "resumed with a hit"}


@pytest.mark.parametrize("traces", [50, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_any_trace_keeps_every_invariant_and_gives_each_request_its_own_tokens(
    mode: str, depth: int, traces: int
) -> None:
    """Invariants 1 to 6, 8 to 18, 20, 21, 26, 27, 30, 32 to 36 and 38 of section 7."""
    happened: set[str] = set()
    for number in range(traces):
        trace = Trace.random(f"{mode}-{number}")
        engine = engine_of(mode, trace, asynchronous=bool(depth))
        try:
            outputs = trace.run(engine)
            check_outputs(trace, outputs)
            check_counters(engine, outputs.values())
            happened |= what_happened(engine)
            check_idle(engine)
        except Exception as error:
            error.add_note(f"trace {mode}-{number}, depth {depth}: {trace}")
            raise
    if mode != "uncached":
        assert happened >= (RESTORES if MODES[mode].needs_snapshot else REPLAYS)
