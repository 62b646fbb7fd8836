"""What graphs save: a decode step and the time to the first token, with graphs and without.

``python benchmarks/graphs.py --preset slice-96`` on a machine with a GPU. Weights are random, and
all modes run the same kernels, so what differs is how they are launched. Without a GPU only
``--quick`` makes sense: it runs the script, without graphs.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass
from typing import Any

import torch
from common import (
    PRESET,
    Decoding,
    argument_parser,
    environment,
    print_table,
    random_prompts,
    summary,
    write_json,
)

from leadline.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from leadline.core.request import EngineRequest, SamplingParams
from leadline.engine.engine import Engine
from leadline.engine.launch import build_engine

GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """What is measured; ``context`` and ``steps`` are tokens of a request, before and after."""

    batches: tuple[int, ...] = (1, 2, 8, 32, 128)
    context: int = 512
    steps: int = 100
    prompts: tuple[int, ...] = (128, 1024, 4096, 8192)
    runs: int = 5


QUICK = Sizes(batches=(1, 2), context=8, steps=2, prompts=(16,), runs=1)


def make_engine(preset: str, mode: str, sizes: Sizes) -> Engine:
    """With room for the largest measurement; nothing is found in a cache."""
    on_gpu = torch.cuda.is_available()
    return build_engine(
        EngineConfig(
            model=preset,
            load_format="dummy",
            kernel_backend="triton" if on_gpu else "auto",
            cuda_graphs=mode,
            max_model_len=max(*sizes.prompts, sizes.context + sizes.steps) + 256,
            cache=CacheConfig(
                enable_prefix_caching=False,
                kv_cache_memory_bytes=8 * GIB if on_gpu else GIB,
            ),
            scheduler=SchedulerConfig(max_num_seqs=max(sizes.batches)),
        )
    )


def decode_ms(engine: Engine, batch: int, sizes: Sizes) -> dict[str, Any]:
    """Milliseconds of a step of ``batch`` requests, one token each."""
    prompts = random_prompts(batch, sizes.context, engine.limits.vocab_size)
    runs = []
    for _ in range(sizes.runs):
        decoding = Decoding(engine, prompts, max_tokens=sizes.steps + 64)
        for _ in range(4):
            decoding.step()
        start = time.perf_counter()
        for _ in range(sizes.steps):
            decoding.step()
        runs.append((time.perf_counter() - start) / sizes.steps * 1e3)
        decoding.stop()
    return summary(runs)


def first_token_ms(engine: Engine, length: int, sizes: Sizes) -> dict[str, Any]:
    """Milliseconds from a prompt of this length to its first token, alone."""
    [prompt] = random_prompts(1, length, engine.limits.vocab_size)
    sampling = SamplingParams(temperature=0, max_tokens=1)
    runs = []
    for number in range(sizes.runs + 1):  # the first one compiles and tunes what graphs do not
        engine.add(EngineRequest(str(number), tuple(prompt), sampling))
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        runs.append((time.perf_counter() - start) * 1e3)
    return summary(runs[1:])


def measure(preset: str, mode: str, sizes: Sizes) -> dict[str, Any]:
    """One mode: start-up, decode steps, first tokens."""
    gc.collect()  # the engine before, and its graphs
    start = time.perf_counter()
    engine = make_engine(preset, mode, sizes)
    seconds, memory = time.perf_counter() - start, 0.0
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        memory = (total - free) / GIB
    return {
        "mode": mode,
        "start_seconds": seconds,
        "gpu_memory_gib": memory,
        "decode_ms": {str(batch): decode_ms(engine, batch, sizes) for batch in sizes.batches},
        "first_token_ms": {
            str(length): first_token_ms(engine, length, sizes) for length in sizes.prompts
        },
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--preset", default=PRESET)
    args: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = QUICK if args.quick else Sizes()
    on_gpu = torch.cuda.is_available()
    modes = ("off", "decode", "lower", "all") if on_gpu else ("off",)
    found = [measure(args.preset, mode, sizes) for mode in modes]
    for kind, unit in (("decode_ms", "requests"), ("first_token_ms", "prompt tokens")):
        print_table(
            (f"{kind}, by {unit}", *modes),
            [
                (size, *(f"{result[kind][size]['median']:.2f}" for result in found))
                for size in found[0][kind]
            ],
        )
    machine = environment() | {"preset": args.preset}
    if on_gpu:
        machine |= {"device": torch.cuda.get_device_name(), "dtype": "bfloat16"}
    write_json(args.json, machine | {"modes": found})


if __name__ == "__main__":
    main()
