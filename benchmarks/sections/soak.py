"""Minutes of mixed traffic with random aborts: no growth of memory, no stall, all pages home.

Sessions of several turns, lone prompts of any length, greedy and drawn answers, some with logprobs,
some salted. Every few seconds the engine proves its books.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.day import check_idle
from benchmarks.sections.section import Bench, Case, Section, Table, ratio
from leadline.bench.workload import random_prompts
from leadline.core.errors import LeadlineError
from leadline.core.request import EngineRequest, FinishReason, SamplingParams
from leadline.engine.engine import Engine

SECONDS, QUICK_SECONDS = 420.0, 3.0
SAMPLES = 90
THIRDS = 3


@dataclass(frozen=True)
class Mix:
    """What requests are like; lengths in tokens, ``(least, most)``, drawn evenly by magnitude.

    Attributes:
        open: requests at the same time.
        turns: of a session; the next repeats the one before and its answer.
        cache_bytes: little enough for pages to be evicted.
        abort: chance that some open request is aborted, at every step.
    """

    open: int
    prompt: tuple[int, int]
    added: tuple[int, int]
    answer: tuple[int, int]
    cache_bytes: int
    turns: int = 4
    abort: float = 0.05

    @property
    def longest(self) -> int:
        return self.prompt[1] + self.turns * (self.added[1] + self.answer[1])


FULL = Mix(open=48, prompt=(8, 12_000), added=(8, 1500), answer=(1, 300), cache_bytes=512 * 2**20)
QUICK = Mix(open=6, prompt=(4, 200), added=(2, 30), answer=(1, 12), cache_bytes=2 * 2**20)


@dataclass
class Talk:
    """A session: its text, and how many turns it will have yet."""

    text: list[int]
    turns_left: int
    salt: str | None


class Traffic:
    """Keeps an engine busy with requests of a mix, and sees that each ends as it should.

    Attributes:
        aborted: requests that were ended by ``abort``.
        finished: requests that ended by themselves.
    """

    def __init__(self, engine: Engine, mix: Mix, seed: int) -> None:
        self._engine, self._mix = engine, mix
        self._draw = random.Random(seed)
        self._open: dict[str, Talk] = {}
        self._aborting: set[str] = set()
        self._resting: list[Talk] = []
        self._number = 0
        self.aborted = self.finished = 0

    def step(self) -> None:
        """Fill up to the mix's number of requests, abort one by chance, and step the engine."""
        while len(self._open) < self._mix.open:
            self._send(self._next_talk())
        if self._draw.random() < self._mix.abort:
            name = self._draw.choice(list(self._open))
            self._aborting.add(name)
            self._engine.abort(name)
        self._read()

    def drain(self) -> None:
        """Abort half of what is open, and let the others end."""
        for name in list(self._open)[::2]:
            self._aborting.add(name)
            self._engine.abort(name)
        while self._engine.has_work:
            self._read()

    def _read(self) -> None:
        for output in self._engine.step():
            name, reason = output.request_id, output.finish_reason
            if output.error is not None:
                raise LeadlineError(f"request {name}: {output.error}")
            talk = self._open[name]
            talk.text += output.token_ids
            if reason is None:
                continue
            del self._open[name]
            if reason is FinishReason.ABORT:
                self._aborting.remove(name)
                self.aborted += 1
            else:
                self._aborting.discard(name)  # it was over before the abort came
                self.finished += 1
                if talk.turns_left:
                    self._resting.append(talk)

    def _next_talk(self) -> Talk:
        """One that was spoken in before, or a new one."""
        if self._resting and self._draw.random() < 0.7:
            talk = self._resting.pop(self._draw.randrange(len(self._resting)))
            talk.turns_left -= 1
            talk.text += self._tokens(self._mix.added)
            return talk
        salt = "salted" if self._draw.random() < 0.1 else None
        return Talk(self._tokens(self._mix.prompt), self._draw.randrange(self._mix.turns), salt)

    def _send(self, talk: Talk) -> None:
        self._number += 1
        name, draw = f"soak-{self._number}", self._draw
        sampling = SamplingParams(
            temperature=draw.choice((0.0, 0.7, 1.0)),
            top_p=draw.choice((1.0, 0.95)),
            top_k=draw.choice((0, 0, 40)),
            seed=draw.choice((None, draw.getrandbits(31))),
            logprobs=draw.choice((None, None, None, 3)),
            max_tokens=self._length(self._mix.answer),
        )
        self._open[name] = talk
        self._engine.add(
            EngineRequest(
                name,
                tuple(talk.text),
                sampling,
                priority=draw.choice((0, 0, 0, 1)),
                cache_salt=talk.salt,
            )
        )

    def _tokens(self, span: tuple[int, int]) -> list[int]:
        vocab_size, seed = self._engine.limits.vocab_size, str(self._draw.getrandbits(64))
        [tokens] = random_prompts(1, self._length(span), vocab_size, seed)
        return tokens

    def _length(self, span: tuple[int, int]) -> int:
        least, most = span
        return round(least * math.pow(most / least, self._draw.random()))


@dataclass
class Watch:
    """What was seen while the traffic ran: one sample of memory a moment, every step's end."""

    host_bytes: list[int] = field(default_factory=list)
    device_bytes: list[int] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def sample(self) -> None:
        self.host_bytes.append(_resident_bytes())
        self.device_bytes.append(_device_bytes())


def soak(engine: Engine, mix: Mix, seconds: float, *, seed: int) -> tuple[Traffic, Watch]:
    """Run traffic for so long, drain it, and prove that nothing is left.

    Raises:
        LeadlineError: a request failed.
        AssertionError: the books are wrong, or pages or slots did not come home.
    """
    traffic, watch = Traffic(engine, mix, seed), Watch()
    begin = time.perf_counter()
    watch.steps.append(begin)
    while (now := watch.steps[-1]) < begin + seconds:
        if now >= begin + len(watch.host_bytes) * seconds / SAMPLES:
            engine.check_integrity()
            watch.sample()
        traffic.step()
        watch.steps.append(time.perf_counter())
    traffic.drain()
    check_idle(engine)
    return traffic, watch


def _resident_bytes() -> int:
    """Of this process, what lies in host memory."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def _device_bytes() -> int:
    """What is in use of a GPU, by whomever; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def thirds(values: Sequence[float]) -> list[Sequence[float]]:
    """Beginning, middle and end of a run, which are compared."""
    size = len(values) // THIRDS
    return [values[i * size : (i + 1) * size] for i in range(THIRDS)]


def figures(traffic: Traffic, watch: Watch) -> dict[str, Any]:
    """Medians of memory and the longest steps, of each third."""
    gaps = [b - a for a, b in pairwise(watch.steps)]
    return {
        "seconds": watch.steps[-1] - watch.steps[0],
        "steps": len(gaps),
        "finished": traffic.finished,
        "aborted": traffic.aborted,
        "host_bytes": [statistics.median(part) for part in thirds(watch.host_bytes)],
        "device_bytes": [statistics.median(part) for part in thirds(watch.device_bytes)],
        "median_step_ms": [1e3 * statistics.median(part) for part in thirds(gaps)],
        "longest_step_ms": [1e3 * max(part) for part in thirds(gaps)],
    }


def cases(bench: Bench) -> Iterator[Case]:
    mix = QUICK if bench.quick else FULL
    config = bench.config(
        max_model_len=mix.longest + 256,
        max_num_seqs=mix.open * 2 // 3,  # so that some wait
        kv_cache_memory_bytes=mix.cache_bytes,
    )
    engine = bench.engines.get(config)
    seconds = min(QUICK_SECONDS if bench.quick else SECONDS, 0.9 * bench.seconds())
    soak(engine, mix, seconds / 20, seed=1)  # compiles and tunes, which is no stall
    bench.log(f"soak: {seconds:.0f} s of traffic")
    traffic, watch = soak(engine, mix, seconds, seed=0)
    counters = engine.stats().counters
    yield {
        **figures(traffic, watch),
        "samples": {"host_bytes": watch.host_bytes, "device_bytes": watch.device_bytes},
        "hit_rate": counters["prefix_cache_hits"] / counters["prefix_cache_queries"],
        "num_preemptions": counters["num_preemptions"],
        "evicted_pages": counters["evicted_pages"],
    }


def table(found: Sequence[Case]) -> Table:
    [case] = found
    rows: list[Sequence[str]] = [
        (
            title,
            *(f"{scale * value:,.1f}" for value in case[key]),
            ratio(case[key][2], case[key][0], 3),
        )
        for title, key, scale in (
            ("host memory, MB", "host_bytes", 1e-6),
            ("device memory, MB", "device_bytes", 1e-6),
            ("median step, ms", "median_step_ms", 1),
            ("longest step, ms", "longest_step_ms", 1),
        )
    ]
    header = (
        f"{case['seconds']:.0f} s, {case['finished']} answers, {case['aborted']} aborted",
        *("first third", "second", "last", "last/first"),
    )
    return header, rows


SECTION = Section("Mixed traffic with aborts; every page came home", cases, table)
