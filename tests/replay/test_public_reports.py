"""What public engines got wrong about prefix caching: the rules of 2.7 that need a real model."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.replay.harness import (
    EXACT,
    PAGE,
    WINDOW,
    Answer,
    Service,
    assert_same,
    bounded,
    exact,
    stepper_of,
    tiny_model,
    tokens_of,
)

both_modes = pytest.mark.parametrize("mode", [exact, bounded], ids=["exact", "bounded"])
Mode = Callable[..., Service]


def poison_slots(service: Service) -> None:
    """NaN (bytes 255) in every ring row of every slot, the padding slot's too; not in snapshots."""
    for field in service.pool.window:
        for tensor in (field.values, field.scales):
            if tensor is not None:
                tensor[: service.size.num_slots].view(torch.uint8).fill_(0xFF)
    for ring in service.pool.open_groups.values():
        ring[: service.size.num_slots] = torch.nan


@both_modes
@pytest.mark.parametrize("chunk", [None, 3])
def test_ROCm_ATOM_1417_a_hit_reads_no_row_of_the_slots_last_owner(
    mode: Mode, chunk: int | None
) -> None:
    """Also SGLang PR 30339. A hit was accepted while the ring held another request's rows."""

    def run(*, poisoned: bool) -> list[Answer]:
        service = mode(tiny_model(), chunk=chunk)
        prompts = [tokens_of(n, seed=n) for n in (32, 40, 49)]
        answers = service.ask(*prompts)
        for extra in (0, 5):
            if poisoned:
                poison_slots(service)
            answers += service.ask(*(prompt + tokens_of(extra, seed=9) for prompt in prompts))
        assert all(answer.cached for answer in answers[3:])
        return answers

    for got, want in zip(run(poisoned=True), run(poisoned=False), strict=True):
        assert_same(got, want)
        assert got.logprobs.isfinite().all()


@pytest.mark.parametrize("extra", [0, 1], ids=["aligned", "one_more"])
@both_modes
def test_vLLM_54713_an_aligned_prompt_sent_again_is_found(mode: Mode, extra: int) -> None:
    """What was kept ended at ``E // B``, what was looked up at ``E - 1``: never the same page."""
    service, prompt = mode(tiny_model()), tokens_of(3 * PAGE + extra, seed=1)
    service.ask(prompt)
    [again], [third] = service.ask(prompt), service.ask(prompt)
    whole = 3 * PAGE
    if mode is exact:
        assert again.cached == (whole if extra else whole - PAGE)
        assert again.replayed == 0
    else:
        # Usage never calls the last token cached: it is fed in any case.
        assert again.cached == (whole if extra else whole - 1)
        assert again.replayed == WINDOW
    assert_same(third, again)


def test_SGLang_35129_long_sessions_hit_at_every_turn() -> None:
    """Snapshots of short prompts beside them must not be what long ones live on."""
    service = exact(tiny_model(), num_snapshots=6)
    sessions = [tokens_of(20, seed=1), tokens_of(90, seed=2)]
    known = [0, 0]
    for turn in range(6):
        service.ask(tokens_of(33, seed=50 + turn), max_tokens=1)
        answers = service.ask(*sessions, max_tokens=5)
        assert [answer.cached for answer in answers] == known
        known = [(len(answer.text) - 1) // PAGE * PAGE for answer in answers]
        sessions = [answer.text + tokens_of(13, seed=turn) for answer in answers]


def test_vLLM_47783_any_pages_in_any_order_give_the_same_logits() -> None:
    """Strides that only fit neighbouring pages turned the output into noise."""
    tokens = tokens_of(70, seed=3)

    def run(pages: list[int]) -> Tensor:
        stepper = stepper_of(tiny_model())
        sequence = stepper.start(tokens)
        sequence.pages = pages
        return stepper.feed(sequence, 40)

    scattered = random.Random(0).sample(range(1, 64), 5)
    EXACT(run(scattered), run([1, 2, 3, 4, 5]))
