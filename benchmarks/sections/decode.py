"""A decode step by batch and context: microseconds, beside the bound, and what it launches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import summary, watched_gpu
from benchmarks.sections.bounds import decode_us
from benchmarks.sections.section import Bench, Case, Section, Table
from leadline.engine.engine import Engine
from leadline.profile.synthetic import start_decoding


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        batches: ``max_model_len`` of an engine, which its graphs are made for -> tokens of a
            context -> requests.
        steps: on the clock; ``warmup`` before them, ``profiled`` behind.
    """

    batches: dict[int, dict[int, tuple[int, ...]]]
    steps: int
    warmup: int = 8
    profiled: int = 4


FULL = Sizes(
    {
        131_072: {8_192: (1, 8, 32, 128), 102_400: (1, 8, 32, 128)},
        524_288: {512_000: (8,)},
    },
    steps=64,
)
QUICK = Sizes({2048: {512: (1, 2), 1024: (2,)}}, steps=2, warmup=1, profiled=1)

# Batch -> share of the bound.
TARGETS = {1: 0.45, 8: 0.62, 32: 0.65, 128: 0.65}

# What is read of the GPU meanwhile, and counted of a step.
_READ = ("mhz", "watts")
_COUNTED = ("kernels", "copies")


def cases(bench: Bench) -> Iterator[Case]:
    """Times first: once a profiler has run in a process, nothing is as fast as it was."""
    sizes = QUICK if bench.quick else FULL
    largest = max(max(batches) for of in sizes.batches.values() for batches in of.values())
    for max_model_len, of_context in sizes.batches.items():
        config = bench.config(
            max_model_len=max_model_len, max_num_seqs=largest, cuda_graphs="decode"
        )
        engine = bench.engines.get(config)
        for context, batches in of_context.items():
            for batch in batches:
                with watched_gpu() as gpu:
                    decoding = Decoding(engine, batch, context, sizes.warmup)
                    us = decoding.step_us(sizes.steps)
                decoding.stop()
                yield {
                    "batch": batch,
                    "context": context,
                    "max_model_len": max_model_len,
                    "us": summary(us),
                    "bound_us": decode_us(bench.model, batch=batch, context=context),
                    **gpu,
                }
    if torch.cuda.is_available():
        context, batches = next(iter(next(iter(sizes.batches.values())).items()))
        for batch in batches:
            decoding = Decoding(engine, batch, context, sizes.warmup)
            found = launches(decoding, sizes.profiled)
            decoding.stop()
            yield {
                "batch": batch,
                "context": context,
                "max_model_len": max_model_len,
                **found,
            }


class Decoding:
    """Requests whose contexts were never computed, some steps after their first tokens."""

    def __init__(self, engine: Engine, batch: int, context: int, warmup: int) -> None:
        engine.reset_prefix_cache()
        self._engine = engine
        self._names = start_decoding(engine, batch=batch, context=context)
        self.step_us(warmup)

    def step_us(self, steps: int) -> list[float]:
        """Microseconds of each step, from one result to the next."""
        us = []
        for _ in range(steps):
            start = time.perf_counter()
            outputs = self._engine.step()
            us.append(1e6 * (time.perf_counter() - start))
            assert len(outputs) == len(self._names), outputs
        return us

    def stop(self) -> None:
        """Leave the engine idle."""
        for name in self._names:
            self._engine.abort(name)
        while self._engine.has_work:
            self._engine.step()


def launches(decoding: Decoding, steps: int) -> dict[str, float]:
    """What a step has a GPU do, by graphs and beside them, and how long all of it takes.

    Returns:
        Nothing where the profiler sees nothing: CUPTI is missing, or not allowed to look.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        decoding.step_us(steps)
        torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type.name == "CUDA"]
    if not events:
        return {}
    copies = [event for event in events if event.name.startswith(("Memcpy", "Memset"))]
    return {
        "kernels": (len(events) - len(copies)) / steps,
        "copies": len(copies) / steps,
        "device_us": sum(event.time_range.elapsed_us() for event in events) / steps,
    }


def table(found: Sequence[Case]) -> Table:
    """A line for each time; launches are those of its batch and context, if they were counted."""
    header = ("context", "batch", "us", "bound, us", "% of bound", "target", *_READ, *_COUNTED)
    counted = {(c["context"], c["batch"]): c for c in found if "kernels" in c}
    rows = []
    for case in found:
        if "us" not in case:
            continue
        us, bound, batch = case["us"]["median"], case["bound_us"], case["batch"]
        launched = counted.get((case["context"], batch), {})
        rows.append(
            (
                f"{case['context']:,}",
                f"{batch}",
                f"{us:,.0f}",
                "" if bound is None else f"{bound:,.0f}",
                "" if bound is None else f"{100 * bound / us:.0f}",
                f"{100 * TARGETS[batch]:.0f}" if batch in TARGETS else "",
                *(f"{case[k]:.0f}" if k in case else "" for k in _READ),
                *(f"{launched[k]:.0f}" if k in launched else "" for k in _COUNTED),
            )
        )
    return header, rows


SECTION = Section("A decode step", cases, table)
