"""The same vectors of DeepSeek-V4 on a GPU, by the reference kernels."""

from __future__ import annotations

import pytest
import torch

from tests.models.golden import GOLDEN, LENGTHS, WAYS, vectors
from tests.steps import make_v4_stepper

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("way", ["one_shot", "chunks_of_64", "beside_seven_others"])
@pytest.mark.parametrize("length", LENGTHS)
def test_logits_are_within_2e_4(length: int, way: str) -> None:
    cases, _ = vectors("v4-tiny")
    stepper = make_v4_stepper(GOLDEN / "v4-tiny", kv_cache_dtype="float32", device="cuda")
    greedy = cases[f"p{length}.greedy_ids"].tolist()
    tokens = cases[f"p{length}.input_ids"].tolist() + greedy[:-1]
    logits = WAYS[way](stepper, tokens, length)[length - 1 :]
    torch.testing.assert_close(logits, cases[f"p{length}.greedy_logits"], rtol=0, atol=2e-4)
    assert logits.argmax(-1).tolist() == greedy
