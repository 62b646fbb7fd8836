"""The golden vectors through the whole engine: prompt logits, chunked prefill, mixed decoding."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from leadline import LLM, SamplingParams

LENGTHS = (1, 7, 120, 130, 300, 700)

on_every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


# Of each folder: what a case without quantisers is called.
CASES = {"v41-tiny": "p{}.noquant", "v4-tiny": "p{}"}
of_every_model = pytest.mark.parametrize("model", CASES)


def make(golden: Path, model: str, rows: int, device: str) -> LLM:
    return LLM(
        golden / model,
        device=device,
        dtype="float32",
        kv_cache_dtype="float32",
        kv_cache_memory_bytes=2**26,
        swa_bounded_replay=False,  # the vectors are exact: every layer on every row
        max_num_batched_tokens=rows,
        max_num_seqs=min(rows, 16),
        skip_tokenizer_init=True,
    )


@pytest.fixture(scope="module")
def vectors(golden: Path) -> dict[str, dict[str, Tensor]]:
    return {model: load_file(golden / model / "cases.safetensors") for model in CASES}


@on_every_device
@of_every_model
@pytest.mark.parametrize("rows", [7, 64, 256, 8192])
def test_prompt_logits_are_within_2e_4_for_any_chunk(
    golden: Path, vectors: dict[str, dict[str, Tensor]], model: str, rows: int, device: str
) -> None:
    llm, cases = make(golden, model, rows, device), vectors[model]
    for length in LENGTHS if rows > 7 else LENGTHS[:4]:
        logits = llm.prompt_logits(cases[f"p{length}.input_ids"].tolist())
        assert logits.dtype == torch.float32
        assert logits.shape == (length, 512)
        want = cases[f"{CASES[model].format(length)}.prompt_logits"]
        torch.testing.assert_close(logits[-len(want) :], want, rtol=0, atol=2e-4)


@on_every_device
@of_every_model
@pytest.mark.parametrize("rows", [16, 64, 8192])
def test_eight_requests_together_draw_every_greedy_token(
    golden: Path, vectors: dict[str, dict[str, Tensor]], model: str, rows: int, device: str
) -> None:
    """Short ones decode while long ones are still in prefill; then all of them are hits."""
    llm, cases = make(golden, model, rows, device), vectors[model]
    lengths = [700, 1, 120, 7, 300, 130, 120, 7]
    prompts = [cases[f"p{length}.input_ids"].tolist() for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    outputs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
    assert outputs[1][0].num_cached_tokens == 512
    for length, output in zip(lengths * 2, chain(*outputs), strict=True):
        [answer], case = output.outputs, CASES[model].format(length)
        assert answer.token_ids == cases[f"{case}.greedy_ids"].tolist()
        assert answer.logprobs is not None
        rows_ = cases[f"{case}.greedy_logits"].log_softmax(-1)
        for row, token, entry in zip(rows_, answer.token_ids, answer.logprobs, strict=True):
            assert entry[token].logprob == pytest.approx(float(row[token]), abs=4e-4)


def test_small_pages_change_nothing(golden: Path, vectors: dict[str, dict[str, Tensor]]) -> None:
    llm, cases = (
        LLM(
            golden / "v41-tiny",
            device="cpu",
            kv_cache_dtype="float32",
            block_size=16,
            kv_cache_memory_bytes=2**26,
            skip_tokenizer_init=True,
        ),
        vectors["v41-tiny"],
    )
    logits = llm.prompt_logits(cases["p300.input_ids"].tolist())
    want = cases["p300.noquant.prompt_logits"]
    torch.testing.assert_close(logits[-32:], want, rtol=0, atol=2e-4)
