"""Counters of one engine; every name carries its unit."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

from leadline.core.pace import Pace
from leadline.core.request import FinishReason

COUNTERS = (
    "prompt_tokens",  # of requests at their first admission
    "generation_tokens",  # sampled
    "computed_tokens",  # prefill rows fed that no cache held, those after a preemption included
    "replayed_tokens",  # prefill rows fed again after a hit
    "upper_rows",  # rows that ran the upper half
    "prompt_tokens_cached",  # of ``prompt_tokens``, as usage reports them
    "prefix_cache_queries",  # prompt tokens looked up at first admissions
    "prefix_cache_hits",  # of these, tokens found
    "num_preemptions",
    "steps",
    "prefill_steps",  # of ``steps``, those with rows of prompts only
    "decode_steps",  # with decode rows only
    "mixed_steps",
    "step_rows",  # fed by all steps
    "oom_steps",  # that device memory did not suffice for; planned again, smaller
    "corrupted_requests",  # ended because their logits were not finite
)
# Bounds of the histogram of rows per step.
ITERATION_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, math.inf)
STEP_PARTS = ("schedule", "build", "forward", "sample")


class EngineMetrics:
    """Monotonic counts and seconds since the engine started.

    Args:
        clock: seconds.

    Attributes:
        counters: by the names of ``COUNTERS``.
        finished: requests ended, by finish reason.
        step_seconds: host seconds by the parts of ``STEP_PARTS``.
        ends: at which requests end.
        feeding: at which rows of prompts are fed.
        steps_by_rows: steps by the first of ``ITERATION_BOUNDS`` that their rows do not exceed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        self.finished = Counter({reason.value: 0 for reason in FinishReason})
        self.step_seconds = dict.fromkeys(STEP_PARTS, 0.0)
        self.ends, self.feeding = Pace(clock), Pace(clock)
        self.steps_by_rows = [0] * len(ITERATION_BOUNDS)

    def count_end(self, reason: FinishReason) -> None:
        """Say that a request has ended."""
        self.finished[reason.value] += 1
        self.ends.count()

    def count_step(self, num_rows: int, num_prefill_rows: int) -> None:
        """Say that a step with so many rows was booked."""
        kind = "mixed" if num_prefill_rows else "decode"
        if num_prefill_rows == num_rows:
            kind = "prefill"
        self.counters["steps"] += 1
        self.counters[f"{kind}_steps"] += 1
        self.counters["step_rows"] += num_rows
        self.feeding.count(num_prefill_rows)
        self.steps_by_rows[bisect_left(ITERATION_BOUNDS, num_rows)] += 1

    @property
    def iteration_tokens(self) -> list[tuple[float, int]]:
        """As ``EngineStats`` shows it: cumulative."""
        return list(zip(ITERATION_BOUNDS, accumulate(self.steps_by_rows), strict=True))

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of the ``with`` body to one part of a step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.step_seconds[part] += time.perf_counter() - start
