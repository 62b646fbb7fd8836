from __future__ import annotations

import random

import pytest

from leadline.eval.exercise import Chat, Passage
from leadline.eval.questions import answer_limit, as_dialogue, fits
from leadline.eval.tasks import FAMILIES
from leadline.text.encoding import ChatEncoder

CHATS = [name for name in FAMILIES if name not in ("recall_dense", "arithmetic_drill")]


@pytest.mark.parametrize("thinking", [False, True], ids=["direct", "thinking"])
@pytest.mark.parametrize("family", CHATS)
def test_the_right_answer_ends_the_turn_and_the_next_prompt_holds_it(
    family: str, thinking: bool, encoder: ChatEncoder
) -> None:
    size = FAMILIES[family].sizes[0]
    chat = FAMILIES[family].make(random.Random(7), size, thinking=thinking)
    assert isinstance(chat, Chat)
    dialogue = as_dialogue(chat, 3, encoder)
    eos = encoder.tokenizer.eos_token_id
    for question, following in zip(dialogue.questions, dialogue.questions[1:], strict=False):
        text = question.prompt.token_ids + question.gold
        if not thinking:  # else the reasoning is left out of what follows
            assert following.prompt.token_ids[: len(text)] == text
    assert all(question.gold[-1] == eos for question in dialogue.questions)
    last = chat.messages[chat.turns()[len(dialogue.questions) - 1]]
    said = encoder.tokenizer.decode(dialogue.questions[-1].gold)
    assert last["content"] in said
    assert last.get("reasoning_content", "") in said


def test_turns_behind_the_last_judged_one_are_not_asked(encoder: ChatEncoder) -> None:
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    dialogue = as_dialogue(Chat("x", turn * 3, wanted=[None, "b", None]), 0, encoder)
    first, second = dialogue.questions
    assert not first.is_measured
    assert second.is_measured
    assert second.cell == "turn 2"


def test_a_passage_is_continued_from_its_prompt(encoder: ChatEncoder) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20
    [question] = as_dialogue(Passage("prose", text), 0, encoder).questions
    ids = question.prompt.token_ids + question.gold
    assert ids == tuple(encoder.tokenizer.encode_prompt(text))
    assert question.num_bytes == len(encoder.tokenizer.token_bytes(question.gold))
    assert question.expectation is None
    assert question.is_measured


def test_a_dialogue_fits_when_every_prompt_leaves_room_for_its_answer(
    encoder: ChatEncoder,
) -> None:
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    dialogue = as_dialogue(Chat("x", turn * 2, wanted=["b", "b"]), 0, encoder)
    last = dialogue.questions[-1]
    longest = len(last.prompt.token_ids) + answer_limit(last)
    assert fits(dialogue, longest)
    assert not fits(dialogue, longest - 1)
