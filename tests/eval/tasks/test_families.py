"""What holds for every family: deterministic, of the wanted size, rendered and read back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from leadline.eval.exercise import Chat, Exercise, Passage
from leadline.eval.tasks import FAMILIES, Family
from leadline.eval.tasks.family import num_tokens
from leadline.text.encoding import ChatEncoder
from leadline.text.tokenizer import Tokenizer
from tests.text.answers import read

SEEDS = range(12)
CHATS = [
    name
    for name, family in FAMILIES.items()
    if isinstance(family.make(random.Random(0), family.sizes[0]), Chat)
]

every_family = pytest.mark.parametrize("name", FAMILIES)
every_chat = pytest.mark.parametrize("name", CHATS)


def make(name: str, seed: int, size: int | None = None, **options: bool) -> Exercise:
    family = FAMILIES[name]
    return family.make(random.Random(seed), size or min(family.sizes[1], 400), **options)


def chat(name: str, seed: int, **options: bool) -> Chat:
    made = make(name, seed, **options)
    assert isinstance(made, Chat)
    return made


def text_of(exercise: Exercise) -> str:
    if isinstance(exercise, Passage):
        return exercise.text
    parts = [message["content"] for message in exercise.messages]
    return "\n".join([*parts, *(str(tool) for tool in exercise.tools)])


@every_family
def test_a_family_names_itself_and_what_it_makes(name: str) -> None:
    family = FAMILIES[name]
    assert family.name == name
    assert family.description
    assert make(name, 0).family == name


@every_family
def test_the_same_seed_makes_the_same_exercise(name: str) -> None:
    assert make(name, 7) == make(name, 7)


@every_family
def test_no_two_seeds_make_the_same_exercise(name: str) -> None:
    texts = [text_of(make(name, seed)) for seed in range(150)]
    assert len(set(texts)) >= 140  # the shortest small talk is just a greeting


# Others end when they run out of things to say.
SIZED = (
    "recall_dense",
    "recall",
    "recall_quiz",
    "recall_turns",
    "needle",
    "multi_turn",
    "quotation",
)


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("size", [512, 1024, 2048])
def test_exercises_are_about_as_long_as_wanted(name: str, size: int) -> None:
    lengths = [num_tokens(text_of(make(name, seed, size))) for seed in SEEDS]
    assert 0.8 * size < sum(lengths) / len(lengths) < 1.2 * size
    assert all(0.55 * size < length < 1.6 * size for length in lengths)


@every_family
def test_exercises_are_not_much_longer_than_wanted(name: str) -> None:
    longest = FAMILIES[name].sizes[1]
    lengths = [num_tokens(text_of(make(name, seed, longest))) for seed in SEEDS]
    assert max(lengths) < 1.8 * longest


@every_chat
@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_is_as_asked_and_left_out_is_both(name: str, thinking: bool) -> None:
    assert all(chat(name, seed, thinking=thinking).thinking is thinking for seed in SEEDS)
    assert {chat(name, seed).thinking for seed in range(40)} == {True, False}


@every_chat
def test_thoughts_stand_where_prompts_keep_them(name: str) -> None:
    """With tools everywhere, else in the last turn, which is the one to be learnt."""
    for seed in SEEDS:
        made = chat(name, seed, thinking=True)
        turns = [made.messages[turn] for turn in made.turns()]
        reasoned = ["reasoning_content" in turn for turn in turns]
        assert reasoned == [bool(made.tools)] * (len(turns) - 1) + [True]
        assert turns[-1]["reasoning_content"]


@every_chat
def test_without_thinking_nothing_is_reasoned(name: str) -> None:
    for seed in SEEDS:
        made = chat(name, seed, thinking=False)
        assert not any("reasoning_content" in message for message in made.messages)
        assert made.reasoning_effort is None


@every_chat
def test_each_turn_has_a_wanted_text_that_its_answer_holds(name: str) -> None:
    for seed in range(40):
        made = chat(name, seed)
        turns = [made.messages[turn] for turn in made.turns()]
        assert len(made.wanted) == len(turns)
        for turn, wanted in zip(turns, made.wanted, strict=True):
            assert (wanted is None) == ("tool_calls" in turn)
            assert wanted is None or (wanted and wanted in turn["content"])


@every_chat
def test_a_conversation_begins_with_its_prompts(name: str, encoder: ChatEncoder) -> None:
    for seed in SEEDS:
        made = chat(name, seed, thinking=False)
        whole = encoder.encode(made.whole()).token_ids
        for turn in made.turns():
            if turn == made.turns()[-1] or made.response_format is None:
                prompt = encoder.encode(made.before(turn)).token_ids
                assert whole[: len(prompt)] == prompt


@every_chat
@pytest.mark.parametrize("thinking", [True, False])
def test_the_parser_reads_right_answers_back(
    name: str, thinking: bool, encoder: ChatEncoder, tokenizer: Tokenizer
) -> None:
    for seed in SEEDS:
        made = chat(name, seed, thinking=thinking)
        for turn in made.turns():
            if thinking and not made.tools and turn != made.turns()[-1]:
                continue  # a past turn, without its reasoning
            before = replace(made.before(turn), drop_thinking=False)
            prompt = encoder.encode(before)
            after = replace(before, messages=made.messages[: turn + 1], add_generation_prompt=False)
            ids = encoder.encode(after).token_ids[len(prompt.token_ids) : -1]
            answer = read(tokenizer, ids, start=prompt.start, tools=made.tools)
            message = made.messages[turn]
            calls = [call["function"] for call in message.get("tool_calls", ())]
            assert answer.reasoning == message.get("reasoning_content", "")
            assert answer.content == message["content"]
            assert answer.calls == [(call["name"], call["arguments"]) for call in calls]


FILLED = [family for family in FAMILIES.values() if family.has_filler]


@pytest.mark.parametrize("family", FILLED, ids=lambda family: family.name)
def test_prose_comes_from_the_filler_that_is_given(family: Family) -> None:
    def filler(rng: random.Random, size: int) -> str:
        return "The quick brown fox jumps over the lazy dog and runs away. " * (size // 14)

    made = [family.make(random.Random(seed), 600, filler=filler) for seed in SEEDS]
    if family.name == "quotation":  # every beginning stands there many times: none can be asked
        assert not any("brown fox" in text_of(one) for one in made)
    else:
        assert sum("brown fox" in text_of(one) for one in made) > len(made) // 2
