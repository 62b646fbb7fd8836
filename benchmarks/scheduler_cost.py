"""What a step costs the host: planning it, building its batch and booking it, without a model."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import argument_parser, environment, print_table, summary, write_json

from leadline.cache.manager import CacheManager
from leadline.cache.replay import ReplayPolicy
from leadline.cache.sizing import CacheSize, pages_of
from leadline.config.engine import SchedulerConfig
from leadline.core.request import Request, SamplingParams
from leadline.engine.batch_builder import BatchBuilder
from leadline.engine.metrics import EngineMetrics
from leadline.engine.plan import GroupResult, StepPlan
from leadline.engine.scheduler import Scheduler

PAGE_SIZE = 256
VOCAB_SIZE = 129280
STEP_SECONDS = 0.02  # of the clock that the scheduler is given
NUM_WAITING = 64
# New text of a waiting request: far more pages than are free, so that none comes in.
NEW_PAGES = 240
# Free pages beyond what growing requests have reserved; those of the steps below are among them.
SPARE_PAGES = 200
PARTS = ("plan", "build", "apply")


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that decode, each with about ``context`` tokens, for ``steps`` steps."""

    running: int
    context: int
    steps: int = 128


class Load:
    """A scheduler in the state that is measured.

    Every running request is past its prefill. Their contexts differ, so that in most steps some
    page fills and another one is taken, for which one of an ended request is evicted. Waiting
    requests begin with the prompt of a running one, and none fits: admission looks each of them up.
    """

    def __init__(self, case: Case) -> None:
        self._draw = np.random.default_rng(0)
        self._now = 0.0
        lengths = self._draw.integers(case.context // 2, 3 * case.context // 2, case.running)
        num_held = sum(pages_of(int(length) + 1, PAGE_SIZE) for length in lengths)
        reserved = max(num_held // 99, min(case.running, 64))  # for growing ones
        num_pages = num_held + reserved + SPARE_PAGES
        slots = case.running + NUM_WAITING
        self.cache = CacheManager(
            CacheSize(num_pages + 1, slots + 1, PAGE_SIZE), enable_prefix_caching=True
        )
        self.scheduler = Scheduler(
            # Budgets of prefills that let the set-up take two steps; decodes do not ask for them.
            SchedulerConfig(
                max_num_seqs=slots,
                max_num_batched_tokens=1 << 30,
                max_prefill_rows=1 << 30,
                max_prefills=slots,
            ),
            self.cache,
            EngineMetrics(),
            ReplayPolicy(lower=True, upper=True, length=128, window=128),
            eos_token_id=1,
            clock=lambda: self._now,
        )
        self._builder = BatchBuilder(num_history=3, device=torch.device("cpu"))
        # What ended before fills the memory with pages that are only kept.
        self._add("ended", self._text((num_pages - 1) * PAGE_SIZE), max_tokens=1)
        self.step(build=False)
        prompts = [self._text(int(length)) for length in lengths]
        for number, prompt in enumerate(prompts):
            self._add(f"running-{number}", prompt, max_tokens=1 << 20)
        self.step(build=False)
        for number in range(NUM_WAITING):
            prompt = prompts[number % case.running] + self._text(NEW_PAGES * PAGE_SIZE)
            self._add(f"waiting-{number}", prompt, max_tokens=256)

    def _text(self, num_tokens: int) -> array[int]:
        return array("i", self._draw.integers(20, VOCAB_SIZE, num_tokens, np.int32).tobytes())

    def _add(self, name: str, prompt: array[int], *, max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.scheduler.add(Request(name, prompt[:], len(prompt), sampling, arrival=self._now))

    def step(self, *, build: bool = True) -> tuple[StepPlan, dict[str, float]]:
        """Plan, build and book a step; its plan, and the seconds of each part."""
        self._now += STEP_SECONDS
        times = [time.perf_counter()]
        plan = self.scheduler.plan()
        times.append(time.perf_counter())
        assert plan is not None, "every earlier step was booked"
        if build:
            self._builder.build(plan.groups)
        times.append(time.perf_counter())
        results = [GroupResult(token_ids=(20,) * group.num_sampled) for group in plan.groups]
        start = time.perf_counter()
        self.scheduler.apply(plan, results)
        seconds = (times[1] - times[0], times[2] - times[1], time.perf_counter() - start)
        return plan, dict(zip(PARTS, seconds, strict=True))


def measure(case: Case) -> dict[str, Any]:
    """Milliseconds of each part over the steps of a case, and the events that fell into them."""
    load = Load(case)
    cache = load.cache
    num_evicted = cache.num_evicted_pages
    milliseconds: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(case.steps):
        plan, seconds = load.step()
        assert len(plan.groups) == plan.num_rows == case.running, "a step is not decode only"
        assert len(load.scheduler.waiting) == NUM_WAITING, "a waiting request came in"
        for part in PARTS:
            milliseconds[part].append(round(1e3 * seconds[part], 4))
    return {
        "running": case.running,
        "waiting": NUM_WAITING,
        "context_tokens": case.context,
        "pages": cache.num_pages,
        "free_pages": cache.num_free_pages,
        "evicted_pages_a_step": (cache.num_evicted_pages - num_evicted) / case.steps,
        **{f"{part}_ms": summary(milliseconds[part]) for part in PARTS},
    }


def main() -> None:
    args = argument_parser(__doc__).parse_args()
    torch.set_num_threads(args.threads)
    cases = [Case(n, context) for context in (8192, 102400) for n in (32, 128, 256)]
    if args.quick:
        cases = [Case(8, 1024, steps=4)]
    record = {**environment(), "preset": "none"}
    print(f"{record['device']}, {NUM_WAITING} waiting requests\n")
    measured = [measure(case) for case in cases]
    print_table(
        ("running", "context", *(f"{part}, ms" for part in PARTS), "evicted pages a step"),
        [
            (
                str(m["running"]),
                str(m["context_tokens"]),
                *(f"{m[f'{part}_ms']['median']:.3f}" for part in PARTS),
                f"{m['evicted_pages_a_step']:.2f}",
            )
            for m in measured
        ],
    )
    write_json(args.json, {**record, "cases": measured})


if __name__ == "__main__":
    main()
