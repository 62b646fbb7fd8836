"""Facts stand between sentences, at the depth that was asked for."""

from __future__ import annotations

import random

import pytest

from leadline.eval.tasks.needle import hide, needle, two_hop
from leadline.eval.tasks.prose import filler


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_fact_stands_at_its_depth(depth: float) -> None:
    for seed in range(20):
        chat = needle(random.Random(seed), 2000, thinking=True, depth=depth, num_questions=1)
        text = chat.messages[0]["content"]
        fact = chat.messages[1]["reasoning_content"].removeprefix("The note says: ")
        assert text.count(fact) == 1
        assert text.find(fact) / len(text) == pytest.approx(depth, abs=0.06)
        assert chat.cell == f"{depth:.0%} of 2000"


def test_hidden_facts_cut_no_sentence() -> None:
    text = filler(random.Random(3), 300)
    hidden = hide(text, ["First.", "Second."], [0.2, 0.8])
    assert hidden.replace("First. ", "").replace("Second. ", "") == text


def test_both_facts_of_a_chain_are_in_its_reasoning() -> None:
    for seed in range(30):
        chat = two_hop(random.Random(seed), 400, thinking=True)
        thought = chat.messages[-1]["reasoning_content"]
        for sentence in thought.split(". "):
            assert sentence.rstrip(".") in chat.messages[0]["content"]
        assert chat.messages[-1]["content"] in thought


def test_filler_states_no_numbers() -> None:
    text = filler(random.Random(4), 20_000)
    assert not any(character.isdigit() for character in text)
    sentences = text.replace("\n\n", " ").split(". ")
    assert len(set(sentences)) > 0.99 * len(sentences)
