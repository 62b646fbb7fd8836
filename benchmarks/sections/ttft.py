"""Time to the first token of one request alone: what replay and its graphs save of a prefill.

The same prompts in three modes: every layer on every row; the layers above the cut on the last rows
only, launched op by op; and the same in graphs. Nothing is found in a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import summary
from benchmarks.sections.bounds import prefill_us
from benchmarks.sections.section import Bench, Case, Section, Table, ratio
from leadline.bench.measure import run
from leadline.bench.workload import random_prompts


@dataclass(frozen=True)
class Sizes:
    """Prompt tokens -> runs on the clock, and runs before."""

    runs: dict[int, int]
    warmup: int = 2


FULL = Sizes({1024: 7, 4096: 7, 8192: 7, 32768: 5, 131072: 3})
QUICK = Sizes({64: 1, 256: 1}, warmup=0)

OFF, EAGER, GRAPHS = "all layers", "replay, upper eager", "replay, graphs"
# The two that the claim is about come first.
MODES: dict[str, dict[str, Any]] = {
    GRAPHS: {"swa_bounded_replay": True, "cuda_graphs": "all"},
    OFF: {"swa_bounded_replay": False, "cuda_graphs": "all"},
    EAGER: {"swa_bounded_replay": True, "cuda_graphs": "lower"},
}

# Prompt tokens from which on they hold: GRAPHS beside OFF, and time beside its bound.
RATIO_TARGETS = {1024: 0.85, 4096: 0.70, 8192: 0.60}
BOUND_TARGETS = {1024: 1.5, 8192: 1.3}


def cases(bench: Bench) -> Iterator[Case]:
    sizes = QUICK if bench.quick else FULL
    max_model_len = max(sizes.runs) + 256
    for mode, settings in MODES.items():
        config = bench.config(
            max_model_len=max_model_len, max_num_seqs=1, enable_prefix_caching=False, **settings
        )
        engine = bench.engines.get(config)
        for length, runs in sizes.runs.items():
            ms = []
            for number in range(sizes.warmup + runs):
                prompts = random_prompts(1, length, engine.limits.vocab_size, f"{length} {number}")
                ms += [1e3 * t for t in run(engine, prompts, 1).ttft]
            replay = settings["swa_bounded_replay"]
            bound = prefill_us(bench.model, prompt=length, replay=replay)
            yield {
                "mode": mode,
                "prompt_tokens": length,
                "ms": summary(ms[sizes.warmup :]),
                "bound_ms": None if bound is None else bound / 1e3,
                "max_model_len": max_model_len,
            }


def table(found: Sequence[Case]) -> Table:
    header = (
        "prompt",
        *(f"{mode}, ms" for mode in (OFF, EAGER, GRAPHS)),
        *("eager/all", "graphs/all", "target"),
        *("all/bound", "graphs/bound", "target"),
    )
    rows = []
    for length in dict.fromkeys(case["prompt_tokens"] for case in found):
        of_mode = {case["mode"]: case for case in found if case["prompt_tokens"] == length}
        ms = {mode: case["ms"]["median"] for mode, case in of_mode.items()}
        bound = {mode: case["bound_ms"] for mode, case in of_mode.items()}
        rows.append(
            (
                f"{length:,}",
                *(f"{ms[mode]:.1f}" if mode in ms else "" for mode in (OFF, EAGER, GRAPHS)),
                *(ratio(ms.get(mode), ms.get(OFF)) for mode in (EAGER, GRAPHS)),
                _target(RATIO_TARGETS, length),
                *(ratio(ms.get(mode), bound.get(mode)) for mode in (OFF, GRAPHS)),
                _target(BOUND_TARGETS, length),
            )
        )
    return header, rows


def _target(targets: dict[int, float], length: int) -> str:
    """The one that holds from the largest length on that is not above this one."""
    return next((f"{targets[n]:.2f}" for n in sorted(targets, reverse=True) if n <= length), "")


SECTION = Section("Time to the first token, one request alone", cases, table)
