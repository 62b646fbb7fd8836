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

pytestmark = pytest.mark.gpu

MODES: dict[str, dict[str, Any]] = {
    "bounded": {},
    "exact": {"swa_bounded_replay": False},
    "no caching": {"swa_bounded_replay": False, "enable_prefix_caching": False},
    "bounded, one step at a time": {"async_scheduling": False},
}


def turns(golden: Path, device: str, **mode: Any) -> list[tuple[int, list[int]]]:
    """Four turns of three sessions side by side: cached tokens and answers."""
    llm = LLM(
        golden / "v41-tiny",
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


def test_the_bundled_model_by_triton_reads_prose_as_by_the_reference() -> None:
    plain, fused = (prompt_logprobs(backend) for backend in ("reference", "triton"))
    assert len(plain) > 2000
    assert abs(plain.mean() - fused.mean()) < 0.02
    # Rounded sums decide some selections otherwise; a wrong kernel is off by whole nats.
    assert np.abs(plain - fused).mean() < 0.25
