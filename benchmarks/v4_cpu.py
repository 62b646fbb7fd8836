"""Decode and prefill of a small DeepSeek-V4 on a CPU, beside Hugging Face transformers.

Both run the same files (``tests/golden/v4-tiny``, float32, nothing is quantised) in this process,
with the same threads. Ours is the engine as it is served: paged cache, continuous batching, the
kernels that it chooses by itself. Theirs is ``DeepseekV4ForCausalLM`` with its own cache, called
row after row without ``generate`` around it. All are greedy; runs of the two alternate.

``python -m benchmarks.v4_cpu`` needs ``pip install "transformers>=5.24"``. It is run as a module:
that package would take ``benchmarks/kernels.py`` for one of its own, were it on the path.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    Decoding,
    argument_parser,
    environment,
    print_table,
    random_prompts,
    summary,
    write_json,
)
from leadline.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from leadline.engine.launch import build_engine

MODEL = Path(__file__).parents[1] / "tests/golden/v4-tiny"
VOCAB_SIZE = 512


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        prompt: tokens before a decode run, of which every sequence has its own.
        warm_up: decode steps before the clock starts.
        new_tokens: decode steps of one run.
        runs: of each way in turn.
    """

    concurrency: tuple[int, ...] = (1, 8)
    prompt: int = 300
    prefill: int = 700
    warm_up: int = 4
    new_tokens: int = 64
    runs: int = 5


QUICK = Sizes(concurrency=(1, 2), prompt=16, prefill=32, warm_up=1, new_tokens=2, runs=1)


@dataclass(frozen=True)
class Run:
    """One run of one way: its tokens/s, and every token of each sequence's answer."""

    speed: float
    answers: list[list[int]]


class Ours:
    """The engine, without prefix caching: every run feeds its prompts again."""

    def __init__(self, max_num_seqs: int) -> None:
        config = EngineConfig(
            model=str(MODEL),
            dtype="float32",
            device="cpu",
            cache=CacheConfig(kv_cache_dtype="float32", enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, rows_per_decode=1),
        )
        self._engine = build_engine(config)

    def decode(self, prompts: Sequence[Sequence[int]], sizes: Sizes) -> Run:
        """Decode steps behind the prompts."""
        decoding = Decoding(self._engine, prompts, max_tokens=10 * sizes.new_tokens)
        for _ in range(sizes.warm_up):
            decoding.step()
        start = time.perf_counter()
        for _ in range(sizes.new_tokens):
            decoding.step()
        seconds = time.perf_counter() - start
        decoding.stop()
        return Run(len(prompts) * sizes.new_tokens / seconds, list(decoding.tokens.values()))

    def prefill(self, prompt: Sequence[int]) -> Run:
        """From arrival to the first token."""
        start = time.perf_counter()
        decoding = Decoding(self._engine, [prompt], max_tokens=8)
        seconds = time.perf_counter() - start
        decoding.stop()
        return Run(len(prompt) / seconds, list(decoding.tokens.values()))


class Theirs:
    """The model of transformers; a batch of equal lengths, so that nothing is padded."""

    def __init__(self) -> None:
        try:
            self._transformers = importlib.import_module("transformers")
            model_type = self._transformers.DeepseekV4ForCausalLM
        except (ImportError, AttributeError) as error:
            raise SystemExit(
                f'{error}; this script needs pip install "transformers>=5.24"'
            ) from None
        self.version = self._transformers.__version__
        self._model = model_type.from_pretrained(MODEL, dtype=torch.float32).eval()

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], sizes: Sizes) -> Run:
        """Decode steps behind the prompts."""
        cache = self._transformers.DynamicCache(config=self._model.config)
        columns = [self._next(torch.tensor(prompts), cache)]
        for _ in range(sizes.warm_up):
            columns.append(self._next(columns[-1], cache))
        start = time.perf_counter()
        for _ in range(sizes.new_tokens):
            columns.append(self._next(columns[-1], cache))
        seconds = time.perf_counter() - start
        answers = torch.cat(columns, dim=1).tolist()
        return Run(len(prompts) * sizes.new_tokens / seconds, answers)

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> Run:
        """From the call to the first token; logits of the last row alone are computed."""
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        cache = self._transformers.DynamicCache(config=self._model.config)
        first = self._next(ids, cache)
        return Run(len(prompt) / (time.perf_counter() - start), first.tolist())

    def _next(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """The best token ``[batch, 1]`` behind ``ids [batch, rows]``."""
        out = self._model(ids, cache=cache, use_cache=True, logits_to_keep=1)
        best: torch.Tensor = out.logits[:, -1:].argmax(-1)
        return best


def measure(sizes: Sizes, ours: Ours, theirs: Theirs) -> list[dict[str, Any]]:
    """Every case, as rows of the table."""
    cases = []
    for concurrency in sizes.concurrency:
        prompts = random_prompts(concurrency, sizes.prompt, VOCAB_SIZE)
        pairs = [
            (ours.decode(prompts, sizes), theirs.decode(prompts, sizes)) for _ in range(sizes.runs)
        ]
        cases.append(_case("decode", concurrency, sizes.prompt, pairs))
    [prompt] = random_prompts(1, sizes.prefill, VOCAB_SIZE)
    pairs = [(ours.prefill(prompt), theirs.prefill(prompt)) for _ in range(sizes.runs)]
    cases.append(_case("prefill", 1, sizes.prefill, pairs))
    return cases


def _case(
    name: str, concurrency: int, prompt_tokens: int, pairs: Sequence[tuple[Run, Run]]
) -> dict[str, Any]:
    tokens = [
        (mine, other)
        for our_run, their_run in pairs
        for a, b in zip(our_run.answers, their_run.answers, strict=True)
        for mine, other in zip(a, b, strict=True)
    ]
    return {
        "case": name,
        "concurrency": concurrency,
        "prompt_tokens": prompt_tokens,
        "unit": "tokens/s",
        "ours": summary([our_run.speed for our_run, _ in pairs]),
        "transformers": summary([their_run.speed for _, their_run in pairs]),
        "ratio": summary([our_run.speed / their_run.speed for our_run, their_run in pairs]),
        "same_tokens": sum(mine == other for mine, other in tokens),
        "compared_tokens": len(tokens),
    }


def main() -> None:
    args = argument_parser(__doc__).parse_args()
    torch.set_num_threads(args.threads)
    sizes = QUICK if args.quick else Sizes()
    theirs = Theirs()
    ours = Ours(max(sizes.concurrency))
    record = environment(MODEL.name)
    cases = measure(sizes, ours, theirs)
    print(
        f"{MODEL.name} on {record['device']}, {record['threads']} thread(s), beside transformers "
        f"{theirs.version}, tokens/s\n"
    )
    print_table(
        ("case", "concurrency", "prompt", "ours", "transformers", "ratio", "same"),
        [
            (
                case["case"],
                str(case["concurrency"]),
                str(case["prompt_tokens"]),
                f"{case['ours']['median']:.1f}",
                f"{case['transformers']['median']:.1f}",
                f"{case['ratio']['median']:.2f}x",
                f"{case['same_tokens']}/{case['compared_tokens']}",
            )
            for case in cases
        ],
    )
    write_json(
        args.json,
        {
            **record,
            "transformers": theirs.version,
            "sizes": asdict(sizes),
            "cases": cases,
        },
    )


if __name__ == "__main__":
    main()
