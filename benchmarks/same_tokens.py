"""The same tokens on a GPU as on a CPU: by every mode of graphs and every switch, in mixed traffic.

``python -m benchmarks.same_tokens --json same.json`` on a machine with a GPU. The bundled model
answers questions of ``leadline eval`` greedily, each of which comes while others are read and
answered. Its CPU answers are float32 by the reference ops, with the same caches and replay; a GPU's
are bf16 by fused kernels in another order of sums, so that a near tie may fall to the other side,
and what follows it differs. How often that happens to a CPU in bf16 stands beside. Golden models
answer in float32 on both, where nothing may differ. Without a GPU it is the CPU's own kernels that
stand beside the reference.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import leadline
from benchmarks.common import (
    argument_parser,
    environment,
    gpu_environment,
    print_table,
    write_json,
)
from leadline.bench.measure import step
from leadline.config.optimization import OPTIMIZATIONS, make_engine_config
from leadline.core.request import EngineRequest, SamplingParams
from leadline.engine.launch import build_engine
from leadline.eval.options import EvalOptions
from leadline.eval.questions import as_dialogue
from leadline.eval.suite import choose_parts
from leadline.text.encoding import ChatEncoder
from leadline.text.profiles import choose_profile
from leadline.text.tokenizer import Tokenizer

TINY = Path(leadline.__file__).parent / "data/tiny"
GOLDENS = Path(__file__).parents[1] / "tests/golden"
FAMILIES = "recall,needle,multi_turn,tool_calls,word_problem,json_output"

# What answers depend on by more than roundings: a replay approximates, and what is replayed follows
# from what was there when a prompt came. A CPU answers with the same.
MEANING = (
    "kv_cache_dtype",
    "swa_bounded_replay",
    "async_scheduling",
    "max_num_batched_tokens",
)

SWITCHES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no graphs": {"cuda_graphs": "off"},
    "graphs of decodes": {"cuda_graphs": "decode"},
    "graphs below the cut": {"cuda_graphs": "lower"},
    "exact mode": {"swa_bounded_replay": False},
    "separate steps": {"fusions": "none"},
    "one stream": {"side_streams": "none"},
    "no prefetch": {"engram_prefetch": False},
    "8-bit records": {"kv_cache_dtype": "fp8"},
    "one step at a time": {"async_scheduling": False},
    "steps of 256 rows": {"max_num_batched_tokens": 256},
    "day0": {"optimization": "day0"},
}
_SMALL = {"max_num_batched_tokens": 96, "max_num_seqs": 2}
GOLDEN_MODES: dict[str, dict[str, dict[str, Any]]] = {
    "v41-tiny": {
        "bounded replay": {},
        "exact mode": {"swa_bounded_replay": False},
        "one step at a time": {"async_scheduling": False},
        "small pages and steps": {"block_size": 16, **_SMALL},
    },
    "v4-tiny": {
        "exact mode": {},
        "one step at a time": {"async_scheduling": False},
        "small pages and steps": {"block_size": 128, **_SMALL},
    },
}

BY_REFERENCE = {"device": "cpu", "kernel_backend": "reference"}

Answers = list[list[int]]


def questions(count: int) -> list[tuple[int, ...]]:
    """Prompts of the bundled model, of all families."""
    tokenizer = Tokenizer(TINY / "tokenizer.json")
    encoder = ChatEncoder(tokenizer, choose_profile("auto", TINY))
    prompts = [
        question.prompt.token_ids
        for part in choose_parts(FAMILIES)
        for exercise in part.exercises("quick", EvalOptions().suite_seed, items=4)
        for question in as_dialogue(exercise, 0, encoder).questions
    ]
    return random.Random(0).sample(prompts, count)


def sessions(count: int) -> list[tuple[int, ...]]:
    """Prompts of golden models, half of which begin like one before."""
    draw = random.Random(1)
    texts: list[tuple[int, ...]] = []
    for _ in range(count):
        begins = draw.choice(texts) if texts and draw.random() < 0.5 else ()
        more = draw.choices(range(3, 500), k=draw.choice((1, 9, 60, 250)))
        texts.append((*begins, *more)[:600])
    return texts


def answers(
    settings: Mapping[str, Any], prompts: Sequence[Sequence[int]], max_tokens: int
) -> Answers:
    """Greedy ones, in the prompts' order, of an engine that is given one after the other."""
    shared = {"kv_cache_memory_bytes": 2**28, "check_integrity": True, "async_scheduling": True}
    engine = build_engine(make_engine_config({**shared, **settings}))
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    draw, waiting = random.Random(2), list(enumerate(prompts))
    found: Answers = [[] for _ in prompts]
    while waiting or engine.has_work:
        if waiting and draw.random() < 0.3:
            number, prompt = waiting.pop()
            engine.add(EngineRequest(str(number), tuple(prompt), sampling))
        for output in step(engine):
            found[int(output.request_id)] += output.token_ids
    return found


def compare(found: Answers, wanted: Answers) -> dict[str, Any]:
    """How many answers are the same, and tokens before an answer differs."""
    agreed = [
        next(
            (i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair))
        )
        for pair in zip(found, wanted, strict=True)
    ]
    return {
        "answers": len(wanted),
        "same_answers": sum(a == b for a, b in zip(found, wanted, strict=True)),
        "same_first_tokens": sum(a[:1] == b[:1] for a, b in zip(found, wanted, strict=True)),
        "tokens": sum(map(len, wanted)),
        "tokens_before_one_differs": sum(agreed),
    }


def golden_cases(device: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Small random models in float32."""
    prompts, max_tokens = sessions(3 if quick else 48), 2 if quick else 24
    for model, modes in GOLDEN_MODES.items():
        plain = {"model": str(GOLDENS / model), "dtype": "float32", "kv_cache_dtype": "float32"}
        for name, mode in list(modes.items())[: 1 if quick else None]:
            got, wanted = (
                answers(plain | mode | by, prompts, max_tokens)
                for by in ({"device": device}, BY_REFERENCE)
            )
            yield {"model": model, "case": name, **compare(got, wanted)}


def bundled_cases(device: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    """The bundled model as its users run it."""
    prompts, max_tokens = questions(3 if quick else 48), 4 if quick else 48
    by_cpu = {"model": str(TINY), **BY_REFERENCE}

    @cache
    def by_reference(**meaning: Any) -> Answers:
        return answers(by_cpu | {"dtype": "float32"} | meaning, prompts, max_tokens)

    if not quick:
        rounded = answers(by_cpu | {"dtype": "bfloat16"}, prompts, max_tokens)
        yield {"model": "tiny", "case": "a CPU in bf16", **compare(rounded, by_reference())}
    for name, switch in list(SWITCHES.items())[: 1 if quick else None]:
        if device == "cpu" and "cuda_graphs" in switch:
            continue
        values = {**OPTIMIZATIONS[switch.get("optimization", "all")], **switch}
        wanted = by_reference(**{key: values[key] for key in MEANING if key in values})
        got = answers({"model": str(TINY), "device": device} | values, prompts, max_tokens)
        yield {"model": "tiny", "case": name, **compare(got, wanted)}


def main() -> None:
    args = argument_parser(__doc__).parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: list[dict[str, Any]] = []
    result = environment("tiny") | gpu_environment() | {"cases": found}
    for case in chain(*(of(device, quick=args.quick) for of in (golden_cases, bundled_cases))):
        found.append(case)
        write_json(args.json, result)
        print(
            f"{case['model']}, {case['case']}: {case['same_answers']}/{case['answers']}", flush=True
        )
    header = ["model", "case", "same answers", "same first tokens", "tokens before one differs"]
    rows = [
        (
            case["model"],
            case["case"],
            f"{case['same_answers']}/{case['answers']}",
            f"{case['same_first_tokens']}/{case['answers']}",
            f"{case['tokens_before_one_differs']}/{case['tokens']}",
        )
        for case in found
    ]
    print_table(header, rows)


if __name__ == "__main__":
    main()
