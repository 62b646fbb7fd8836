from __future__ import annotations

import json

import pytest

from leadline.eval.exercise import Chat
from leadline.eval.scoring import Answer, Call, Expectation, holds_words
from leadline.text.chat import CallArguments, CallStart, Content, Reasoning, ResponseFormat, Tool


@pytest.mark.parametrize(
    ("text", "words", "holds"),
    [
        ("The code is 4711.", "4711", True),
        ("The code is 47110.", "4711", False),
        ("box 12", "2", False),
        ("It is in the Red Hall!", "Red Hall", True),
        ("Paris", "paris", False),
        ("{ }", "}", True),
        ("Close: ])", "])", True),
        ("Close: (])", "])", False),
        ("a-b-c", "a-b-c", True),
        ("", "x", False),
    ],
)
def test_wanted_words_stand_alone(text: str, words: str, holds: bool) -> None:
    assert holds_words(text, words) is holds


TOOL = Tool(
    "lamp",
    parameters={
        "type": "object",
        "properties": {"room": {"type": "string"}, "state": {"enum": ["on", "off"]}},
        "required": ["room"],
    },
)
OTHER = Tool("door", parameters={"type": "object", "properties": {}})


def calling(*calls: tuple[str, str]) -> Expectation:
    return Expectation(None, False, tuple(Call(*call) for call in calls), (TOOL, OTHER))


@pytest.mark.parametrize(
    ("arguments", "parses", "is_met"),
    [
        ('{"room": "hall", "state": "on"}', True, True),
        ('{"state":"on","room":"hall"}', True, True),
        ('{"room": "hall"}', True, False),
        ('{"room": "hall", "state": "dim"}', False, False),
        ('{"state": "on"}', False, False),
        ('{"room": "hall", "state": "on", "x": 1}', False, False),
        ('{"room": "hall"', False, False),
        ("[]", False, False),
    ],
)
def test_calls_parse_and_their_arguments_are_exact(
    arguments: str, parses: bool, is_met: bool
) -> None:
    wanted = calling(("lamp", '{"room": "hall", "state": "on"}'))
    answer = Answer(calls=[Call("lamp", arguments)])
    assert (wanted.parses(answer), wanted.is_met(answer)) == (parses, is_met)


def test_a_number_may_be_spelled_in_any_way() -> None:
    wanted = calling(("door", '{"n": 1.0}'))
    assert wanted.is_met(Answer(calls=[Call("door", '{"n": 1}')]))


def test_parallel_calls_may_come_in_any_order_but_none_may_miss() -> None:
    wanted = calling(("lamp", '{"room": "a"}'), ("door", "{}"))
    both = [Call("door", "{}"), Call("lamp", '{"room": "a"}')]
    assert wanted.is_met(Answer(calls=both))
    assert not wanted.is_met(Answer(calls=both[:1]))
    assert not wanted.is_met(Answer(calls=[*both, both[0]]))


def test_calls_of_unknown_tools_and_no_calls_do_not_parse() -> None:
    wanted = calling(("lamp", '{"room": "a"}'))
    assert wanted.parses(Answer(calls=[Call("bell", "{}")])) is False
    assert wanted.parses(Answer(text="I will.")) is False


def test_a_call_where_text_is_wanted_is_wrong() -> None:
    wanted = Expectation("blue", False, (), (TOOL,))
    assert wanted.parses(Answer("blue")) is None
    assert wanted.is_met(Answer("It is blue."))
    assert not wanted.is_met(Answer("It is blue.", [Call("lamp", '{"room": "a"}')]))


def test_what_was_cut_is_wrong() -> None:
    assert not Expectation("blue", False, (), ()).is_met(Answer("It is blue", is_cut=True))


@pytest.mark.parametrize(
    ("text", "parses", "is_met"),
    [
        ('{"b": 2.0, "a": [1]}', True, True),
        ('\n{"a": [1], "b": 2}\n', True, True),
        ('{"a": [1]}', True, False),
        ('Here: {"a": [1], "b": 2}', False, False),
    ],
)
def test_json_counts_by_what_it_means(text: str, parses: bool, is_met: bool) -> None:
    wanted = Expectation('{"a": [1], "b": 2}', True, (), ())
    assert (wanted.parses(Answer(text)), wanted.is_met(Answer(text))) == (parses, is_met)


def test_expectations_of_a_chats_turns() -> None:
    arguments = json.dumps({"room": "hall"})
    call = {"id": "1", "type": "function", "function": {"name": "lamp", "arguments": arguments}}
    chat = Chat(
        "tool_calls",
        [
            {"role": "user", "content": "Light!"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "ok"},
            {"role": "assistant", "content": "Done."},
            {"role": "user", "content": "As JSON?"},
            {"role": "assistant", "content": "{}"},
        ],
        wanted=[None, None, "{}"],
        tools=(TOOL,),
        response_format=ResponseFormat("json_object"),
    )
    first, second, third = (Expectation.of_turn(chat, i) for i in range(3))
    assert first == Expectation(None, False, (Call("lamp", arguments),), (TOOL,))
    assert not second.is_judged
    assert third.is_json


def test_an_answer_is_what_stands_behind_the_reasoning() -> None:
    answer = Answer()
    answer.take([Reasoning("blue?"), Content("re"), Content("d"), CallStart(0, "id", "lamp")])
    answer.take([CallArguments(0, "{"), CallArguments(0, "}"), CallStart(1, "id2", "door")])
    assert answer == Answer("red", [Call("lamp", "{}"), Call("door", "")])
