"""Values that are asked for stand in the note, once, and the note's wording leads to them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from leadline.eval.exercise import Chat, Passage
from leadline.eval.tasks import FAMILIES
from leadline.eval.tasks.facts import NOT_NOTED, draw_fact, draw_notes
from leadline.eval.tasks.kinds import KINDS, Kind
from leadline.eval.tasks.recall import recall, recall_dense, recall_quiz


@pytest.mark.parametrize("name", ["recall", "recall_turns", "needle", "two_hop", "multi_turn"])
def test_what_is_wanted_stands_in_an_earlier_message(name: str) -> None:
    for seed in range(60):
        chat = FAMILIES[name].make(random.Random(seed), 400)
        assert isinstance(chat, Chat)
        for turn, wanted in zip(chat.turns(), chat.wanted, strict=True):
            context = "\n".join(message["content"] for message in chat.messages[:turn])
            if wanted in (NOT_NOTED, "Noted", "Deleted"):
                continue
            assert wanted is not None
            assert wanted.casefold() in context.casefold()


def test_a_quiz_is_thought_through_in_the_words_of_the_note() -> None:
    for seed in range(40):
        question, answer = recall_quiz(random.Random(seed), 400, thinking=True).messages
        thoughts = answer["reasoning_content"].split("\n")
        answers = answer["content"].split("\n")
        assert len(thoughts) == len(answers) >= 2
        for thought in thoughts:
            assert thought.partition(". ")[2] in question["content"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.statements[0])
def test_every_wording_names_key_and_value(kind: Kind) -> None:
    rng = random.Random(1)
    for _ in range(40):
        fact = draw_fact(rng, kind)
        question = fact.ask(rng)
        for text in (fact.text, question.text, fact.sentence()):
            assert fact.key.casefold() in text.casefold()
        assert fact.value.casefold() in fact.text.casefold()
        assert question.answer in (fact.value, fact.sentence())


def test_no_key_stands_twice_in_a_note() -> None:
    for seed in range(30):
        keys = [fact.key for fact in draw_notes(random.Random(seed), 2000)]
        assert len(set(keys)) == len(keys)


def test_the_wording_of_a_question_settles_the_form_of_its_answer() -> None:
    rng = random.Random(2)
    forms: dict[tuple[int, str], set[bool]] = {}
    for _ in range(3000):
        fact = draw_fact(rng)
        question = fact.ask(rng)
        wording = question.text.casefold().replace(fact.key.casefold(), "{}")
        is_bare = question.answer == fact.value
        forms.setdefault((KINDS.index(fact.kind), wording), set()).add(is_bare)
    assert all(len(seen) == 1 for seen in forms.values())


def test_an_evaluation_asks_one_question_that_can_be_answered() -> None:
    for seed in range(100):
        chat = recall(random.Random(seed), 256, thinking=False, num_questions=1)
        assert len(chat.turns()) == 1
        assert chat.wanted[0] != NOT_NOTED
        assert chat.cell == "256"


def test_pairs_of_a_drill_come_back_whole_in_every_round() -> None:
    for seed in range(60):
        passage = recall_dense(random.Random(seed), 300)
        assert isinstance(passage, Passage)
        counts = Counter(passage.text.replace("\n", " ").split())
        assert counts.most_common(1)[0][1] >= 2
