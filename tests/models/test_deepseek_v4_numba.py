"""DeepSeek-V4 over numba's kernels, against the same vectors as over the reference ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from leadline.kernels.registry import REFERENCE, choose
from tests.models.golden import GOLDEN, WAYS, vectors
from tests.replay.harness import PAGE, V4_CONFIG, tokens_of
from tests.steps import make_v4_stepper


@pytest.fixture(autouse=True)
def numba() -> Iterator[None]:
    pytest.importorskip("numba", reason="the extra 'cpu' is not installed")
    with choose("numba", torch.device("cpu"), torch.float32).active():
        yield


@pytest.mark.parametrize("way", ["one_shot", "chunks_of_7", "beside_seven_others"])
@pytest.mark.parametrize("length", [1, 130, 300])
def test_logits_are_within_2e_4(length: int, way: str) -> None:
    cases, _ = vectors("v4-tiny")
    stepper = make_v4_stepper(GOLDEN / "v4-tiny", kv_cache_dtype="float32")
    greedy = cases[f"p{length}.greedy_ids"].tolist()
    tokens = cases[f"p{length}.input_ids"].tolist() + greedy[:-1]
    logits = WAYS[way](stepper, tokens, length)[length - 1 :]
    torch.testing.assert_close(logits, cases[f"p{length}.greedy_logits"], rtol=0, atol=2e-4)
    assert logits.argmax(-1).tolist() == greedy


def test_packed_caches_and_weights_give_what_the_reference_makes_of_them() -> None:
    """Of the middle row: others have selections or experts that flip where scores are close."""

    def logits() -> Tensor:
        stepper = make_v4_stepper(V4_CONFIG, kv_cache_dtype="fp8_ds_mla", block_size=PAGE)
        return stepper.feed(stepper.start(tokens_of(100, seed=1)), 13)

    fast = logits()
    with REFERENCE.active():
        wanted = logits()
    assert ((fast - wanted).norm(dim=1) / wanted.norm(dim=1)).median() < 0.01
