"""Caching, replay and steps planned ahead on a GPU draw what they draw on a CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import leadline
from leadline import LLM, SamplingParams
from leadline.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from leadline.core.request import EngineRequest, TokenOutput
from leadline.engine.launch import build_engine

pytestmark = pytest.mark.gpu

MODES: dict[str, dict[str, Any]] = {
    "bounded": {},
    "replay below the cut": {"swa_replay_upper": False},
    "replay above the cut": {"swa_replay_lower": False},
    "longer replay": {"swa_replay_length": 300},
    "exact": {"swa_bounded_replay": False},
    "no caching": {"swa_bounded_replay": False, "enable_prefix_caching": False},
    "bounded, one step at a time": {"async_scheduling": False},
    "small pages": {"block_size": 16},
    "small steps": {"max_num_batched_tokens": 96, "max_num_seqs": 2},
    "V4": {"model": "v4-tiny"},
    "V4, small pages and steps": {
        "model": "v4-tiny",
        "block_size": 128,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 2,
    },
}


def turns(
    golden: Path, device: str, *, model: str = "v41-tiny", **mode: Any
) -> list[tuple[int, list[int]]]:
    """Four turns of three sessions side by side: cached tokens and answers."""
    llm = LLM(
        golden / model,
        device=device,
        dtype="float32",
        kv_cache_dtype="float32",
        kv_cache_memory_bytes=2**27,
        check_integrity=True,
        skip_tokenizer_init=True,
        **mode,
    )
    draw = random.Random(3)
    texts = [[draw.randrange(3, 500) for _ in range(n)] for n in (300, 513, 700)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    seen = []
    for _ in range(4):
        for text, output in zip(texts, llm.generate(texts, params, use_tqdm=False), strict=True):
            answer = output.outputs[0].token_ids
            seen.append((output.num_cached_tokens, answer))
            text += answer + [draw.randrange(3, 500) for _ in range(120)]
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_sessions_over_a_gpu_are_those_over_a_cpu(golden: Path, mode: str) -> None:
    assert turns(golden, "cuda", **MODES[mode]) == turns(golden, "cpu", **MODES[mode])


def test_on_a_gpu_exact_mode_equals_no_caching(golden: Path) -> None:
    cached, cold = (
        [answer for _, answer in turns(golden, "cuda", **MODES[mode])]
        for mode in ("exact", "no caching")
    )
    assert cached == cold


def crowd(golden: Path, device: str, *, asynchronous: bool) -> dict[str, list[int]]:
    """Requests that arrive while others run, more than there is room for; some are aborted."""
    engine = build_engine(
        EngineConfig(
            model=str(golden / "v41-tiny"),
            device=device,
            dtype="float32",
            async_scheduling=asynchronous,
            check_integrity=True,
            max_model_len=800,
            cache=CacheConfig(kv_cache_dtype="float32", kv_cache_memory_bytes=2**24, block_size=16),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=200, max_num_seqs=6, max_prefill_rows=50, max_prefills=3
            ),
        )
    )
    draw = random.Random(5)  # of 4, one draw is a tie within the noise of float32
    got: dict[str, list[int]] = {}
    texts: list[list[int]] = [[]]
    for number in range(24):
        text = draw.choice(texts) + draw.choices(range(3, 500), k=draw.choice((1, 9, 60, 250)))
        texts.append(text[:600])
        sampling = SamplingParams(
            temperature=draw.choice((0.0, 0.8)), seed=number, max_tokens=20, ignore_eos=True
        )
        engine.add(EngineRequest(str(number), tuple(texts[-1]), sampling))
        for _ in range(draw.randrange(6)):
            tell(engine.step(), got)
        if draw.random() < 0.25:
            engine.abort(str(draw.randrange(number + 1)))
    while engine.has_work:
        tell(engine.step(), got)
    stats = engine.stats()
    assert stats.finished["abort"] > 0
    assert stats.counters["prefix_cache_hits"] > 0
    assert (stats.num_free_pages, stats.num_free_slots) == (stats.num_pages, stats.num_slots)
    return got


def tell(outputs: list[TokenOutput], got: dict[str, list[int]]) -> None:
    for output in outputs:
        assert output.error is None, output.error
        got.setdefault(output.request_id, []).extend(output.token_ids)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["one_at_a_time", "ahead"])
def test_a_crowd_over_a_gpu_gets_what_it_gets_over_a_cpu(golden: Path, asynchronous: bool) -> None:
    over_gpu, over_cpu = (
        crowd(golden, device, asynchronous=asynchronous) for device in ("cuda", "cpu")
    )
    assert over_gpu == over_cpu


def prompt_logprobs(kernel_backend: str, **mode: Any) -> np.ndarray[Any, Any]:
    """Of held-out prose by the bundled model: the logarithm of each token's probability."""
    package = Path(leadline.__file__).parent
    llm = LLM(
        package / "data/tiny",
        device="cuda",
        dtype="bfloat16",
        kernel_backend=kernel_backend,
        kv_cache_memory_bytes=2**27,
        skip_tokenizer_init=True,
        **mode,
    )
    tokenizer = Tokenizer.from_file(str(package / "data/tiny/tokenizer.json"))
    lines = (package / "eval/data/heldout.jsonl").read_text().splitlines()
    prompts = [tokenizer.encode(json.loads(line)["text"]).ids[:600] for line in lines[:24]]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    found = []
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            found.append(entry[token].logprob)
    return np.array(found)


# What may move a logit, but not what the model thinks.
SWITCHES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "op by op": {"cuda_graphs": "off"},
    "graphs of decodes": {"cuda_graphs": "decode"},
    "graphs below the cut": {"cuda_graphs": "lower"},
    "separate steps": {"fusions": "none"},
    "one stream": {"side_streams": "none"},
    "no prefetch": {"engram_prefetch": False},
    "8-bit records": {"kv_cache_dtype": "fp8"},
    "FP8 experts": {"moe_activations": "fp8"},
    "aligned scales": {"align_scales": True},
    "free rounding": {"exact_rounding": False},
    "tables on the files": {"engram_tables": "mmap"},
    "one step at a time": {"async_scheduling": False},
    "steps of 512 rows": {"max_num_batched_tokens": 512, "max_num_seqs": 64},
}


@pytest.fixture(scope="module")
def by_reference() -> np.ndarray[Any, Any]:
    return prompt_logprobs("reference")


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_bundled_model_by_triton_reads_prose_as_by_the_reference(
    switch: str, by_reference: np.ndarray[Any, Any]
) -> None:
    fused = prompt_logprobs("triton", **SWITCHES[switch])
    assert len(fused) == len(by_reference) > 2000
    assert abs(by_reference.mean() - fused.mean()) < 0.02
    # Rounded sums decide some selections otherwise; a wrong kernel is off by whole nats.
    assert np.abs(by_reference - fused).mean() < 0.25
