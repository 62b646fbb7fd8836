"""The same vectors on a GPU, by the reference kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from leadline import LLM, SamplingParams
from tests.models.golden import GOLDEN, LENGTHS, WAYS, vectors
from tests.steps import make_stepper

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("way", ["one_shot", "chunks_of_64", "beside_seven_others"])
@pytest.mark.parametrize("length", LENGTHS)
def test_v41_tiny_without_quantisers_is_within_2e_4(length: int, way: str) -> None:
    cases, _ = vectors("v41-tiny")
    stepper = make_stepper(GOLDEN / "v41-tiny", kv_cache_dtype="float32", device="cuda")
    name = f"p{length}.noquant"
    greedy = cases[f"{name}.greedy_ids"].tolist()
    tokens = cases[f"p{length}.input_ids"].tolist() + greedy[:-1]
    logits = WAYS[way](stepper, tokens, length)[length - 1 :]
    torch.testing.assert_close(logits, cases[f"{name}.greedy_logits"], rtol=0, atol=2e-4)
    assert logits.argmax(-1).tolist() == greedy


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.float32}, {"dtype": torch.bfloat16}],
    ids=["float32", "bfloat16"],
)
def test_v41_reference_deviates_like_another_order_of_sums(options: dict[str, Any]) -> None:
    mode = {torch.float32: "f32q", torch.bfloat16: "bf16"}[options["dtype"]]
    cases, notes = vectors("v41-reference")
    deviation, noise = [], []
    for length in (1, 7, 130, 300, 520):
        stepper = make_stepper(GOLDEN / "v41-reference", device="cuda", **options)
        logits = stepper.feed(stepper.start(cases[f"p{length}.input_ids"].tolist()))
        want = cases[f"p{length}.{mode}.prompt_logits"]
        deviation.append((logits[-len(want) :] - want).abs().mean())
        noise.append(notes[f"p{length}.{mode}"]["noise_embedding"]["mean"])
    # Five prompts of a heavy-tailed quantity: half as much again is no sign of another formula.
    assert torch.stack(deviation).mean() <= 1.5 * torch.tensor(noise).mean()


def test_llm_runs_on_the_gpu_and_draws_what_the_cpu_draws() -> None:
    cases, _ = vectors("v41-tiny")
    tokens = cases["p300.input_ids"].tolist()
    answers = []
    for device in ("cuda", "cpu"):
        llm = LLM(
            model=GOLDEN / "v41-tiny",
            device=device,
            dtype="float32",
            kv_cache_dtype="float32",
            kv_cache_memory_bytes=2**28,
            skip_tokenizer_init=True,
        )
        params = [
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
            SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True),
        ]
        outputs = llm.generate([tokens, tokens], params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
