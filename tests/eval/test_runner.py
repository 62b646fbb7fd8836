from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.eval.arms import ARMS, Arm, arm_config
from leadline.eval.measure import Record, divergence, measure
from leadline.eval.questions import Dialogue
from leadline.eval.runner import Outcome, Runner
from leadline.llm import LLM
from leadline.text.tokenizer import Tokenizer
from tests.eval.conftest import WINDOW

SETTINGS: dict[str, Any] = {
    "block_size": WINDOW,
    "kv_cache_memory_bytes": 2**25,
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
}


@contextmanager
def runner_of(arm: Arm, model: Path, tokenizer: Tokenizer, **more: Any) -> Iterator[Runner]:
    with arm_config(arm, {"model": str(model), **SETTINGS, **more}) as config:
        yield Runner(config, tokenizer, WINDOW)


class Ran:
    """Outcomes and counters of an arm over the dialogues."""

    def __init__(self, arm: Arm, model: Path, dialogues: list[Dialogue], tokenizer: Tokenizer):
        self.dialogues = dialogues
        with runner_of(arm, model, tokenizer) as runner:
            self.outcomes = runner.run(dialogues)
            self.counters = runner.counters()

    def records(self, reference: Ran) -> list[Record]:
        return [
            measure(
                self.dialogues[number],
                place,
                outcome,
                reference.outcomes[number, place],
                window=WINDOW,
            )
            for (number, place), outcome in self.outcomes.items()
        ]


@pytest.fixture(scope="module")
def ran(model: Path, dialogues: list[Dialogue], tokenizer: Tokenizer) -> dict[str, Ran]:
    names = ("exact", "replay-lower", "replay-upper", "replay-both", "kv-nvfp4", "dense")
    return {name: Ran(ARMS[name], model, dialogues, tokenizer) for name in names}


def test_exact_against_itself_is_zero(
    ran: dict[str, Ran], model: Path, dialogues: list[Dialogue], tokenizer: Tokenizer
) -> None:
    again = Ran(Arm("again", {}), model, dialogues, tokenizer)
    for record in again.records(ran["exact"]):
        assert (record.kl, record.kl_window, record.flips) == (0, 0, 0)


def test_every_turn_is_measured(ran: dict[str, Ran], dialogues: list[Dialogue]) -> None:
    places = {(d.number, place) for d in dialogues for place in range(len(d.questions))}
    for arm in ran.values():
        assert arm.outcomes.keys() == places


def test_distributions_are_those_of_a_full_forward(
    ran: dict[str, Ran], model: Path, dialogues: list[Dialogue]
) -> None:
    """Of every token of the right answers, however much the prefix cache knew."""
    settings = {**SETTINGS, "kv_cache_dtype": "float32", "swa_bounded_replay": False}
    llm = LLM(model, skip_tokenizer_init=True, **settings)
    for (number, place), outcome in ran["exact"].outcomes.items():
        question = dialogues[number].questions[place]
        prompt, gold = question.prompt.token_ids, question.gold
        logits = llm.prompt_logits((prompt + gold)[:-1])[len(prompt) - 1 :]
        want = logits.double().log_softmax(-1)
        torch.testing.assert_close(outcome.logprobs.double(), want, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("arm", "replays", "trims"),
    [
        ("exact", False, False),
        ("kv-nvfp4", False, False),
        ("dense", False, False),
        ("replay-lower", True, False),
        ("replay-upper", False, True),
        ("replay-both", True, True),
    ],
)
def test_arms_switch_the_engine(arm: str, replays: bool, trims: bool, ran: dict[str, Ran]) -> None:
    counters, exact = ran[arm].counters, ran["exact"].counters
    assert (counters["replayed_tokens"] > 0) is replays
    fed = counters["computed_tokens"] + counters["replayed_tokens"] + counters["generation_tokens"]
    skipped = fed - counters["upper_rows"] > exact["generation_tokens"] / 2
    assert skipped is trims
    assert counters["prompt_tokens_cached"] > 0


@pytest.mark.parametrize(
    "arm", ["replay-lower", "replay-upper", "replay-both", "kv-nvfp4", "dense"]
)
def test_what_an_arm_changes_is_seen(arm: str, ran: dict[str, Ran]) -> None:
    records = ran[arm].records(ran["exact"])
    assert max(record.kl or 0 for record in records) > 1e-6


def test_later_turns_find_those_before_them(ran: dict[str, Ran], dialogues: list[Dialogue]) -> None:
    for (number, place), outcome in ran["replay-both"].outcomes.items():
        question = dialogues[number].questions[place]
        known = len(question.prompt.token_ids) - WINDOW
        if place:
            before = dialogues[number].questions[place - 1]
            known = len(before.prompt.token_ids + before.gold) - 1
        assert outcome.num_cached == known // WINDOW * WINDOW
        assert outcome.num_replayed == WINDOW


def test_answers_do_not_depend_on_the_company(
    ran: dict[str, Ran], model: Path, dialogues: list[Dialogue], tokenizer: Tokenizer
) -> None:
    alone = Ran(ARMS["replay-both"], model, dialogues[:1], tokenizer)
    for key, outcome in alone.outcomes.items():
        other = ran["replay-both"].outcomes[key]
        torch.testing.assert_close(outcome.logprobs, other.logprobs, rtol=0, atol=1e-3)
        assert outcome.answer == other.answer


def test_divergence_against_the_closed_form() -> None:
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.9, 0.1]])
    want = 0.5 * torch.log(p / q).sum(-1).double()
    torch.testing.assert_close(divergence(p.log(), q.log()), want)


def test_numbers_of_an_answer(dialogues: list[Dialogue]) -> None:
    """A uniform distribution against one that knows the answer."""
    question = dialogues[0].questions[0]
    n, size = len(question.gold), 1000
    uniform = torch.full((n, size), 1 / size).log()
    sure = torch.full((n, size), 0.5 / (size - 1))
    sure[range(n), list(question.gold)] = 0.5
    outcomes = [Outcome(table, None, 0, 0) for table in (uniform, sure.log())]
    record = measure(dialogues[0], 0, outcomes[1], outcomes[0], window=2)
    assert record.nll == pytest.approx(torch.log(torch.tensor(2.0)).item(), rel=1e-5)
    assert record.kl == pytest.approx(record.kl_window, rel=1e-5)
    assert record.flips == pytest.approx(sum(i != 0 for i in question.gold) / n)
    assert record.correct is None
