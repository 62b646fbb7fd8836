"""Where a decode step's time goes: the engine's parts, and every op of ``kernels.ops``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from common import (
    PRESET,
    Decoding,
    argument_parser,
    environment,
    print_table,
    random_prompts,
    write_json,
)

from leadline.config.engine import EngineConfig
from leadline.engine.engine import Engine
from leadline.engine.launch import build_engine
from leadline.kernels.observe import observed

PROMPT_TOKENS = 256
WARM_UP = 4


class OpTimer:
    """Seconds and calls of each op that it observes, by name.

    An op that another op calls counts as part of its caller.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @contextmanager
    def around(self, op: str, caller: str) -> Iterator[None]:
        """For ``observed``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[op] += time.perf_counter() - start
            self.calls[op] += 1


def profile(engine: Engine, concurrency: int, *, prompt_tokens: int, steps: int) -> dict[str, Any]:
    """Decode ``steps`` steps: milliseconds of a step, by part and by op."""
    prompts = random_prompts(concurrency, prompt_tokens, engine.limits.vocab_size)
    decoding = Decoding(engine, prompts, max_tokens=10 * (WARM_UP + steps))
    for _ in range(WARM_UP):
        decoding.step()
    timer, before = OpTimer(), engine.stats().step_seconds
    with observed(timer.around):
        start = time.perf_counter()
        for _ in range(steps):
            decoding.step()
        seconds = time.perf_counter() - start
    after = engine.stats().step_seconds
    decoding.stop()
    parts = {part: after[part] - before[part] for part in after}

    def per_step(total: float) -> dict[str, float]:
        return {"ms": 1e3 * total / steps, "percent": 100 * total / seconds}

    outside = parts["forward"] + parts["sample"] - timer.seconds.total()
    return {
        "concurrency": concurrency,
        "prompt_tokens": prompt_tokens,
        "steps": steps,
        "step_ms": 1e3 * seconds / steps,
        "parts": {part: per_step(total) for part, total in parts.items()},
        "schedule_and_build_percent": 100 * (parts["schedule"] + parts["build"]) / seconds,
        "ops": {
            name: {"calls": timer.calls[name] / steps, **per_step(total)}
            for name, total in timer.seconds.most_common()
        },
        "forward_and_sample_outside_ops": per_step(outside),
    }


def main() -> None:
    args = argument_parser(__doc__).parse_args()
    torch.set_num_threads(args.threads)
    engine = build_engine(EngineConfig(model=PRESET, load_format="dummy", device="cpu"))
    record = environment()
    print(f"{PRESET} on {record['device']}, {record['threads']} thread(s)\n")
    if args.quick:
        cases = [profile(engine, 8, prompt_tokens=16, steps=2)]
    else:
        cases = [profile(engine, c, prompt_tokens=PROMPT_TOKENS, steps=64) for c in (1, 8, 32)]
    for case in cases:
        _print(case)
    write_json(args.json, {**record, "cases": cases})


def _print(case: dict[str, Any]) -> None:
    concurrency = case["concurrency"]
    print(f"Concurrency {concurrency}: {case['step_ms']:.2f} ms a step")
    print_table(
        ("part", "ms", "% of step"),
        [(name, f"{p['ms']:.2f}", f"{p['percent']:.1f}") for name, p in case["parts"].items()],
    )
    rest = case["forward_and_sample_outside_ops"]
    rows = [*case["ops"].items(), ("(between ops)", {"calls": 0, **rest})]
    print_table(
        ("op", "calls", "ms", "% of step"),
        [
            (name, f"{op['calls']:.0f}", f"{op['ms']:.2f}", f"{op['percent']:.1f}")
            for name, op in rows
        ],
    )
    print(
        f"Scheduler and batch builder together at concurrency {concurrency}: "
        f"{case['schedule_and_build_percent']:.1f}% of a step\n"
    )


if __name__ == "__main__":
    main()
