"""Agents in a closed loop, by the plainest settings (``day0``) and by all that the engine has.

Each lane plays its sessions one after the other, and sends a turn as soon as the one before has
ended. A turn repeats all before it, the engine's answers included, and adds what a tool said. Texts
and lengths are the same for both arms, so that seconds can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.day import Session, Shape, make_sessions
from benchmarks.sections.section import Bench, Case, Section, Table, ratio
from leadline.bench.measure import step
from leadline.core.request import EngineRequest, SamplingParams
from leadline.engine.engine import Engine


@dataclass(frozen=True)
class Sizes:
    """Lanes -> sessions in all; ``warmup`` lanes play a session each before."""

    shape: Shape
    sessions: dict[int, int]
    warmup: int


FULL = Sizes(
    Shape(
        turns=(3, 3),
        group=8,
        system=(1500, 2000),
        task=(200, 800),
        new=(100, 300),
        answer=(16, 48),
        long_answer=(64, 128),
        long_answers_in=10,
    ),
    sessions={1: 2, 64: 64},
    warmup=2,
)
QUICK = Sizes(
    Shape(
        turns=(2, 2),
        group=2,
        system=(250, 300),
        task=(10, 20),
        new=(5, 10),
        answer=(2, 3),
        long_answer=(4, 4),
    ),
    sessions={1: 1, 3: 3},
    warmup=1,
)


@dataclass
class Turn:
    """What became of one turn.

    Attributes:
        number: of its session, from 0.
        prompt_tokens: of them ``cached`` were found in the cache.
        sent: seconds on the loop's clock.
        came: the same of each token of its answer.
    """

    number: int
    prompt_tokens: int
    sent: float
    cached: int = 0
    came: list[float] = field(default_factory=list)


def closed_loop(engine: Engine, sessions: Sequence[Session], lanes: int) -> list[Turn]:
    """Play all sessions, ``lanes`` at a time.

    Raises:
        LeadlineError: a request failed.
    """
    waiting = list(reversed(sessions))
    playing: dict[str, tuple[Session, Turn]] = {}
    turns: list[Turn] = []

    def send(session: Session) -> None:
        session.text.extend(session.added[session.turn])
        answer = session.answers[session.turn]
        sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        prompt = tuple(session.text)
        turns.append(Turn(session.turn, len(prompt), time.perf_counter()))
        playing[session.name] = session, turns[-1]
        engine.add(EngineRequest(session.name, prompt, sampling, session_key=session.name))

    while waiting or playing:
        while waiting and len(playing) < lanes:
            send(waiting.pop())
        outputs = step(engine)
        now = time.perf_counter()
        for output in outputs:
            session, turn = playing[output.request_id]
            session.text.extend(output.token_ids)
            turn.came += [now] * len(output.token_ids)
            turn.cached = max(turn.cached, output.num_cached_tokens)
            if output.finish_reason is not None:
                del playing[output.request_id]
                session.turn += 1
                if session.turn < len(session.added):
                    send(session)
    return turns


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Latencies in milliseconds, tokens a second, and what the cache had."""
    first = [turn.came[0] - turn.sent for turn in turns if not turn.number]
    later = [turn.came[0] - turn.sent for turn in turns if turn.number]
    gaps = [b - a for turn in turns for a, b in pairwise(turn.came)]
    seconds = max(turn.came[-1] for turn in turns) - min(turn.sent for turn in turns)
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    output_tokens = sum(len(turn.came) for turn in turns)
    return {
        "turns": len(turns),
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "hit_rate": sum(turn.cached for turn in turns) / prompt_tokens,
        "output_tokens_per_second": output_tokens / seconds,
        "total_tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        "first_ttft_ms": _quantiles(first),
        "later_ttft_ms": _quantiles(later),
        "itl_ms": _quantiles(gaps),
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {name: 1e3 * float(np.quantile(seconds, q)) for name, q in (("p50", 0.5), ("p90", 0.9))}


ARMS = ("all", "day0")


def cases(bench: Bench) -> Iterator[Case]:
    sizes, vocab_size = QUICK if bench.quick else FULL, bench.model.vocab_size
    most = max(sizes.sessions.values())
    longest = max(s.num_tokens for s in _sessions(vocab_size, sizes, most, seed=0))
    for arm in ARMS:
        config = bench.config(
            max_model_len=longest + 256, max_num_seqs=max(sizes.sessions), optimization=arm
        )
        engine = bench.engines.get(config)
        # Compiles and tunes what only such steps have.
        closed_loop(engine, _sessions(vocab_size, sizes, sizes.warmup, seed=1), sizes.warmup)
        for lanes, count in sizes.sessions.items():
            engine.reset_prefix_cache()
            turns = closed_loop(engine, _sessions(vocab_size, sizes, count, seed=0), lanes)
            yield {"arm": arm, "lanes": lanes, "sessions": count, **figures(turns)}
        del engine  # whose weights leave no room for those of the other arm


def _sessions(vocab_size: int, sizes: Sizes, count: int, *, seed: int) -> list[Session]:
    return make_sessions(count, sizes.shape, vocab_size=vocab_size, seed=seed)


# Title, value of a case, whether more of it is better.
ROWS: tuple[tuple[str, Callable[[Case], float], bool], ...] = (
    ("first turn, TTFT p50, ms", lambda case: case["first_ttft_ms"]["p50"], False),
    ("first turn, TTFT p90, ms", lambda case: case["first_ttft_ms"]["p90"], False),
    ("later turns, TTFT p50, ms", lambda case: case["later_ttft_ms"]["p50"], False),
    ("later turns, TTFT p90, ms", lambda case: case["later_ttft_ms"]["p90"], False),
    ("between tokens p50, ms", lambda case: case["itl_ms"]["p50"], False),
    ("between tokens p90, ms", lambda case: case["itl_ms"]["p90"], False),
    ("output tokens/s", lambda case: case["output_tokens_per_second"], True),
    ("all tokens/s", lambda case: case["total_tokens_per_second"], True),
    ("found in the cache, %", lambda case: 100 * case["hit_rate"], True),
)


def table(found: Sequence[Case]) -> Table:
    rows: list[Sequence[str]] = []
    for lanes in dict.fromkeys(case["lanes"] for case in found):
        of_arm = {case["arm"]: case for case in found if case["lanes"] == lanes}
        for title, value_of, more_is_better in ROWS:
            values = {arm: value_of(case) for arm, case in of_arm.items()}
            better, worse = ("all", "day0") if more_is_better else ("day0", "all")
            rows.append(
                (
                    f"{lanes} at once: {title}",
                    *(f"{values[arm]:.1f}" if arm in values else "" for arm in ("day0", "all")),
                    ratio(values.get(better), values.get(worse)),
                )
            )
    return ("", "day0", "all", "times better"), rows


SECTION = Section("Agents, by the plainest settings and by all", cases, table)
