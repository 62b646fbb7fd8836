"""A day of agentic sessions on one engine: the text, the clock, and what the cache made of it.

Every turn of a session repeats all before it, the engine's own answers included, and adds what a
tool said. Times are those of a simulated clock: a step takes what its rows would cost, thinking
costs nothing, and the same arguments give the same day.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from leadline.cache.manager import CacheManager
from leadline.cache.replay import ReplayPolicy
from leadline.cache.sizing import CacheSize, pages_of
from leadline.config.engine import SchedulerConfig
from leadline.core.request import EngineRequest, SamplingParams
from leadline.engine.engine import Engine
from leadline.engine.sampler import Sampler
from leadline.models.batch import CacheFields, ForwardBatch, Model

FIRST_ID = 20  # texts are made of ids from here on
STEP_SECONDS = 0.05
ROW_SECONDS = 0.00002
STEPS_PER_CHECK = 100  # between two proofs of the books while the engine is busy


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens and times in seconds of a day; ``(least, most)``, drawn evenly.

    Attributes:
        group: sessions that share a system prompt.
        new: tokens of a turn that the model did not write.
        answer: tokens that it writes.
        long_answer: the same of one answer in ``long_answers_in``.
        think: from an answer to the next turn.
        arrivals: seconds over which the sessions begin.
    """

    turns: tuple[int, int] = (10, 40)
    group: int = 10
    system: tuple[int, int] = (2000, 4000)
    task: tuple[int, int] = (500, 4000)
    new: tuple[int, int] = (100, 400)
    answer: tuple[int, int] = (20, 100)
    long_answer: tuple[int, int] = (400, 1600)
    long_answers_in: int = 20
    think: tuple[float, float] = (0.2, 5.0)
    arrivals: float = 60.0

    def scaled(self, divisor: int) -> Shape:
        """The same day in texts that are ``divisor`` times shorter."""

        def shorter(span: tuple[int, int]) -> tuple[int, int]:
            return max(1, span[0] // divisor), max(1, span[1] // divisor)

        return replace(
            self,
            system=shorter(self.system),
            task=shorter(self.task),
            new=shorter(self.new),
            answer=shorter(self.answer),
            long_answer=shorter(self.long_answer),
        )


# Few turns, but so many long answers that requests have to be preempted.
SHORT = Shape(turns=(3, 8), long_answers_in=4, think=(0.1, 1.0), arrivals=10.0)


@dataclass(slots=True)
class Session:
    """What one agent will say, and all that was said so far.

    Attributes:
        arrival: seconds at which it begins.
        added: per turn, the tokens that are not the model's.
        answers: per turn, how many tokens it writes.
        pauses: per turn, seconds from its end to the next.
        text: everything so far.
        turn: the turn that is next or runs.
    """

    name: str
    arrival: float
    added: list[list[int]]
    answers: list[int]
    pauses: list[float]
    text: array[int] = field(default_factory=lambda: array("i"))
    turn: int = 0

    @property
    def num_tokens(self) -> int:
        """Length of the text at the end of the last turn."""
        return sum(map(len, self.added)) + sum(self.answers)


def make_sessions(count: int, shape: Shape, *, vocab_size: int, seed: int) -> list[Session]:
    """The sessions of a day; those of one seed begin alike, however many there are."""
    systems: dict[int, list[int]] = {}
    sessions = []
    for number in range(count):
        group = number // shape.group
        if group not in systems:
            systems[group] = _text(random.Random(f"{seed} group {group}"), shape.system, vocab_size)
        draw = random.Random(f"{seed} session {number}")
        num_turns = draw.randint(*shape.turns)
        added = [_text(draw, shape.new, vocab_size) for _ in range(num_turns)]
        added[0] = systems[group] + _text(draw, shape.task, vocab_size)
        sessions.append(
            Session(
                name=f"session-{number}",
                arrival=draw.uniform(0.0, shape.arrivals),
                added=added,
                answers=[_answer(draw, shape) for _ in range(num_turns)],
                pauses=[draw.uniform(*shape.think) for _ in range(num_turns)],
            )
        )
    return sessions


def _text(draw: random.Random, span: tuple[int, int], vocab_size: int) -> list[int]:
    return draw.choices(range(FIRST_ID, vocab_size), k=draw.randint(*span))


def _answer(draw: random.Random, shape: Shape) -> int:
    is_long = draw.randrange(shape.long_answers_in) == 0
    return draw.randint(*(shape.long_answer if is_long else shape.answer))


class FakeModel:
    """A model whose answer depends on every token before it, read through pages and windows.

    A page keeps, for each position, a number that stands for all tokens up to there; a slot keeps
    the last of them, as window rings do. A chunk goes on from the page of the position before it,
    and finds its window unchanged, or the forward fails.
    """

    vocab_size = 4096
    _MULTIPLIER = 6364136223846793005  # mixes an id and its position; sums wrap around at 2**64

    def __init__(self, size: CacheSize, window: int) -> None:
        self._page_size, self._window = size.page_size, window
        # The null page's last place stands for what precedes position 0.
        self._pages = torch.zeros(size.num_pages, size.page_size, dtype=torch.int64)
        self._ring = torch.zeros(size.num_slot_rows, 2 * window, dtype=torch.int64)

    def bind_cache(self, cache: CacheFields | None) -> None:
        raise AssertionError("the fake brings its own cache")

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As ``CachePool.copy_slots``."""
        for source, target in pairs:
            self._ring[target] = self._ring[source]

    def lower(self, batch: ForwardBatch) -> tuple[Tensor]:
        """``[m]`` int64: what stands for all tokens up to each row."""
        groups, counts = batch.req_of_row, batch.q_off.diff()
        firsts = batch.q_off[:-1]
        starts = batch.pos[firsts]
        mixed = (batch.ids.long() + 1) * (2 * batch.pos + 1) * self._MULTIPLIER
        sums = mixed.cumsum(0)
        before = self._read(batch, torch.arange(len(starts)), starts - 1)
        state = sums + (before - (sums - mixed)[firsts])[groups]
        self._check_windows(batch, starts)
        new = batch.pos >= batch.write_from[groups]
        page, place = self._places(batch, groups, batch.pos)
        assert bool((state == self._pages[page, place])[~new].all()), "a replay gives another text"
        self._pages[page[new], place[new]] = state[new]
        last = batch.pos >= (starts + counts - self._ring.shape[1])[groups]
        slots = batch.slot[groups]
        self._ring[slots[last], batch.pos[last] % self._ring.shape[1]] = state[last]
        return (state,)

    def _places(self, batch: ForwardBatch, groups: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        return batch.page_table[groups, pos // self._page_size].long(), pos % self._page_size

    def _read(self, batch: ForwardBatch, groups: Tensor, pos: Tensor) -> Tensor:
        """What stands at positions ``pos`` of ``groups``; 0 before the first."""
        page, place = self._places(batch, groups, pos.clamp_min(0))
        return self._pages[page, place] * (pos >= 0)

    def _check_windows(self, batch: ForwardBatch, starts: Tensor) -> None:
        """Every window row that a group's first row may read holds what its page holds."""
        pos = starts[:, None] - torch.arange(1, self._window)
        groups, distance = (pos >= batch.floor_lo[:, None]).nonzero(as_tuple=True)
        pos = pos[groups, distance]
        rows = self._ring[batch.slot.long()[groups], pos % self._ring.shape[1]]
        assert torch.equal(rows, self._read(batch, groups, pos)), "a window of somebody else"

    def upper(self, state: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """``[u, 1]``."""
        return state[0].unsqueeze(1)

    def logits(self, hidden: Tensor) -> Tensor:
        """One-hot ``[v, V]``."""
        spread = (hidden[:, 0] >> 16) % (self.vocab_size - FIRST_ID)
        return torch.nn.functional.one_hot(FIRST_ID + spread, self.vocab_size).float()


MODES = ("bounded", "exact", "off")


def policy_of(mode: str, *, window: int, page_size: int) -> ReplayPolicy:
    """Bounded replay; or exact numbers, with snapshots or (``off``) without any caching."""
    bounded = mode == "bounded"
    return ReplayPolicy(bounded, bounded, window, window, snapshot_interval=64 * page_size)


def size_for(mode: str, sessions: Sequence[Session], page_size: int) -> CacheSize:
    """Pages for a quarter of all text, slots for half of the sessions.

    Exact mode has a snapshot for every session beside them.
    """
    num_pages = sum(pages_of(session.num_tokens, page_size) for session in sessions) // 4
    num_snapshots = len(sessions) if mode == "exact" else 0
    return CacheSize(num_pages + 1, len(sessions) // 2 + 1, page_size, num_snapshots)


def run_day(
    mode: str,
    sessions: Sequence[Session],
    model: Model,
    size: CacheSize,
    copy_slots: Callable[[Sequence[tuple[int, int]]], None],
    policy: ReplayPolicy,
    *,
    vocab_size: int,
) -> dict[str, Any]:
    """Live through the day on a new engine around a model that has its cache."""
    day = Day(sessions)
    max_rows = 32 * size.page_size
    engine = Engine(
        model,
        Sampler(eos_token_id=0),
        CacheManager(
            size, enable_prefix_caching=mode != "off", needs_snapshot=policy.needs_snapshot
        ),
        copy_slots,
        policy,
        SchedulerConfig(
            max_num_seqs=size.num_slots - 1,
            max_num_batched_tokens=max_rows,
            max_prefill_rows=max_rows // 4,
        ),
        vocab_size=vocab_size,
        eos_token_id=0,
        max_model_len=size.page_size * (size.num_pages - 1),
        num_history=3,
        clock=day.clock,
    )
    return day.run(engine)


def fake_day(
    mode: str, shape: Shape, *, sessions: int, seed: int, divisor: int = 1
) -> dict[str, Any]:
    """One day on the fake model; texts, pages and window are official ones over ``divisor``."""
    page_size, window = 256 // divisor, 128 // divisor
    people = make_sessions(
        sessions, shape.scaled(divisor), vocab_size=FakeModel.vocab_size, seed=seed
    )
    size = size_for(mode, people, page_size)
    model = FakeModel(size, window)
    policy = policy_of(mode, window=window, page_size=page_size)
    return run_day(mode, people, model, size, model.copy_slots, policy, vocab_size=model.vocab_size)


class Day:
    """Runs sessions on an engine and proves at every idle moment that nothing is lost."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.now = 0.0
        self._sessions = {session.name: session for session in sessions}
        self._due = [(session.arrival, session.name) for session in sessions]
        heapq.heapify(self._due)
        self._tokens = hashlib.sha256()

    def clock(self) -> float:
        """Seconds since the day began."""
        return self.now

    def run(self, engine: Engine) -> dict[str, Any]:
        """Live through the day; what it cost, and how it went.

        The digest of all answers is the same for two days in which every turn got the same.
        """
        num_steps = num_idle = 0
        most_waiting = 0
        while self._due or engine.has_work:
            if not engine.has_work:
                num_idle += 1
                check_idle(engine)
                self.now = max(self.now, self._due[0][0])
            while self._due and self._due[0][0] <= self.now:
                self._send(engine, self._sessions[heapq.heappop(self._due)[1]])
            before = _num_rows(engine)
            for output in engine.step():
                assert output.error is None, output.error
                session = self._sessions[output.request_id]
                session.text.extend(output.token_ids)
                if output.finish_reason is not None:
                    self._end_turn(session)
            self.now += STEP_SECONDS + ROW_SECONDS * (_num_rows(engine) - before)
            num_steps += 1
            most_waiting = max(most_waiting, engine.stats().num_waiting)
            if num_steps % STEPS_PER_CHECK == 0:
                engine.check_integrity()
        check_idle(engine)
        for name in sorted(self._sessions):
            self._tokens.update(self._sessions[name].text.tobytes())
        return {
            **_figures(engine),
            "sessions": sum(s.turn == len(s.added) for s in self._sessions.values()),
            "turns": sum(s.turn for s in self._sessions.values()),
            "simulated_seconds": round(self.now, 1),
            "idle_moments": num_idle,
            "most_waiting": most_waiting,
            "text_digest": self._tokens.hexdigest()[:16],
        }

    @staticmethod
    def _send(engine: Engine, session: Session) -> None:
        session.text.extend(session.added[session.turn])
        length = session.answers[session.turn]
        sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        engine.add(
            EngineRequest(session.name, tuple(session.text), sampling, session_key=session.name)
        )

    def _end_turn(self, session: Session) -> None:
        ready = self.now + session.pauses[session.turn]
        session.turn += 1
        if session.turn < len(session.added):
            heapq.heappush(self._due, (ready, session.name))


def _num_rows(engine: Engine) -> int:
    counters = engine.metrics.counters
    return sum(counters[n] for n in ("computed_tokens", "replayed_tokens", "generation_tokens"))


def check_idle(engine: Engine) -> None:
    """Assert that the books are right and nobody holds anything."""
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_free_pages == stats.num_pages, "pages leaked"
    assert stats.num_free_slots == stats.num_slots, "slots leaked"


def _figures(engine: Engine) -> dict[str, Any]:
    """Counters of the day, and the shares that they make."""
    stats = engine.stats()
    counters = stats.counters
    prefill_rows = counters["computed_tokens"] + counters["replayed_tokens"]
    return {
        "pages": stats.num_pages,
        "slots": stats.num_slots,
        "hit_rate": counters["prefix_cache_hits"] / counters["prefix_cache_queries"],
        "replayed_share": counters["replayed_tokens"] / prefill_rows,
        "prefill_rows": prefill_rows,
        **dict(counters),
    }
