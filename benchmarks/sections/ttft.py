"""Time to the first token of one request alone: what replay and its graphs save of a prefill.

The same prompts in three modes: every layer on every row; the layers above the cut on the last rows
only, launched op by op; and the same in graphs. Nothing is found in a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common import summary
from benchmarks.sections.bounds import prefill_us
from benchmarks.sections.section import Bench, Case, Section, Table, ratio
from leadline.bench.measure import run
from leadline.bench.workload import random_prompts

# Prompt tokens -> runs before the clock, and on it.
FULL = {1024: (2, 7), 4096: (2, 7), 8192: (2, 7), 32768: (1, 3), 131072: (1, 2)}
QUICK = {64: (0, 1), 256: (0, 1)}

OFF, EAGER, GRAPHS = "all layers", "replay, upper eager", "replay, graphs"
# The two that the claim is about come first.
MODES: dict[str, dict[str, Any]] = {
    GRAPHS: {"swa_bounded_replay": True, "cuda_graphs": "all"},
    OFF: {"swa_bounded_replay": False, "cuda_graphs": "all"},
    EAGER: {"swa_bounded_replay": True, "cuda_graphs": "lower"},
}

# By prompt tokens: GRAPHS beside OFF, and time beside its bound.
RATIO_TARGETS = {1024: 0.85, 4096: 0.70, 8192: 0.60, 32768: 0.60, 131072: 0.60}
BOUND_TARGETS = {1024: 1.5, 8192: 1.3, 32768: 1.3, 131072: 1.3}


def cases(bench: Bench) -> Iterator[Case]:
    sizes = QUICK if bench.quick else FULL
    max_model_len = max(sizes) + 256
    for mode, settings in MODES.items():
        config = bench.config(
            max_model_len=max_model_len, max_num_seqs=1, enable_prefix_caching=False, **settings
        )
        engine = bench.engines.get(config)
        for length, (warmup, runs) in sizes.items():
            ms = []
            for number in range(warmup + runs):
                prompts = random_prompts(1, length, engine.limits.vocab_size, f"{length} {number}")
                ms += [1e3 * t for t in run(engine, prompts, 1).ttft]
            replay = settings["swa_bounded_replay"]
            bound = prefill_us(bench.model, prompt=length, replay=replay)
            yield {
                "mode": mode,
                "prompt_tokens": length,
                "ms": summary(ms[warmup:]),
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
                f"{RATIO_TARGETS.get(length, '')}",
                *(ratio(ms.get(mode), bound.get(mode)) for mode in (OFF, GRAPHS)),
                f"{BOUND_TARGETS.get(length, '')}",
            )
        )
    return header, rows


SECTION = Section("Time to the first token, one request alone", cases, table)
