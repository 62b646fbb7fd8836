"""Counters of one engine; every name carries its unit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

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
    "corrupted_requests",  # ended because their logits were not finite
)
STEP_PARTS = ("schedule", "build", "forward", "sample")


class EngineMetrics:
    """Monotonic counts and seconds since the engine started.

    Attributes:
        counters: by the names of ``COUNTERS``.
        finished: requests ended, by finish reason.
        step_seconds: host seconds by the parts of ``STEP_PARTS``.
    """

    def __init__(self) -> None:
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        self.finished = Counter({reason.value: 0 for reason in FinishReason})
        self.step_seconds = dict.fromkeys(STEP_PARTS, 0.0)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of the ``with`` body to one part of a step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.step_seconds[part] += time.perf_counter() - start
