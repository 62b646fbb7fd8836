"""Calls fit the schemas that the prompt shows, and answers follow from results."""

from __future__ import annotations

import json
import random

import pytest

from leadline.core.request import StructuredOutputs
from leadline.eval.exercise import Chat
from leadline.eval.tasks.tool_calls import tool_calls
from leadline.eval.tasks.tools import BLUEPRINTS
from leadline.eval.tasks.tools.blueprint import Blueprint
from leadline.eval.tasks.tools.in_use import draw_call, polite, settle
from leadline.eval.tasks.tools.invented import invent
from leadline.text.chat import ToolChoice
from leadline.text.grammar import content_constraint
from leadline.text.profiles import V41
from leadline.text.tokenizer import Tokenizer
from leadline.text.tools_schema import check_tools
from tests.text.grammars import Grammars

INVENTED = [invent(random.Random(seed)) for seed in range(12)]
every_tool = pytest.mark.parametrize(
    "blueprint", [*BLUEPRINTS, *INVENTED], ids=lambda blueprint: blueprint.names[0]
)


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def chats(count: int, size: int = 600) -> list[Chat]:
    return [tool_calls(random.Random(seed), size) for seed in range(count)]


def test_there_are_many_tools_and_their_names_differ() -> None:
    names = [name for blueprint in BLUEPRINTS for name in blueprint.names]
    assert len(BLUEPRINTS) >= 60
    assert len(set(names)) == len(names)


@every_tool
def test_arguments_fit_the_schema(blueprint: Blueprint, grammars: Grammars) -> None:
    """By the grammar that the engine would hold a strict call to."""
    for seed in range(3):
        rng = random.Random(seed)
        offered = settle(rng, blueprint)
        call = draw_call(rng, offered, spelled_out=seed == 1)
        schema = {**(offered.tool.parameters or {}), "additionalProperties": False}
        grammar = content_constraint(StructuredOutputs(json=schema))
        assert grammar is not None
        assert grammars.accepts(grammar, json.dumps(call.arguments)), (schema, call.arguments)


@every_tool
def test_requests_name_every_argument(blueprint: Blueprint) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        call = draw_call(rng, settle(rng, blueprint), spelled_out=seed % 4 == 0)
        request = call.request.casefold()
        for value in leaves(call.arguments):
            assert value is True or str(value).casefold() in request
        assert "{" not in call.request + call.answer


@every_tool
def test_the_answer_holds_what_the_tool_returned_or_was_told(blueprint: Blueprint) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        call = draw_call(rng, settle(rng, blueprint))
        known = [str(value) for value in leaves(call.arguments)]
        told = call.result
        try:
            known += [str(value) for value in leaves(json.loads(call.result))]
        except ValueError:
            known.append(told)
        assert call.value in call.answer
        assert not blueprint.result or any(value in call.answer for value in known)


def leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, list):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def test_every_call_is_of_a_tool_in_the_prompt_and_has_a_result() -> None:
    for chat in chats(60):
        check_tools(chat.tools, ToolChoice(), V41)
        names = {tool.name for tool in chat.tools}
        calls = [call for message in chat.messages for call in message.get("tool_calls", ())]
        results = [message for message in chat.messages if message["role"] == "tool"]
        assert all(call["function"]["name"] in names for call in calls)
        assert [call["id"] for call in calls] == [result["tool_call_id"] for result in results]
        assert len({call["id"] for call in calls}) == len(calls)


def test_all_kinds_of_turns_occur() -> None:
    made = chats(200)
    turns = [chat.messages[turn] for chat in made for turn in chat.turns()]
    num_calls = {len(turn.get("tool_calls", ())) for turn in turns}
    contents = [turn["content"] for turn in turns]
    assert num_calls == {0, 1, 2, 3}
    assert any(content == "I have no tool for that." for content in contents)
    assert any(content.startswith("The tool failed: ") for content in contents)
    assert any("that it returns" in m["content"] for chat in made for m in chat.messages)
    assert {len(chat.tools) for chat in chats(60, size=1500)} >= {1, 2, 3, 4, 5, 6, 7, 8}


def test_a_chained_call_takes_what_the_first_one_returned() -> None:
    seen = 0
    for chat in chats(200):
        for i, message in enumerate(chat.messages):
            if "that it returns" not in message["content"]:
                continue
            seen += 1
            returned = leaves(json.loads(chat.messages[i + 2]["content"]))
            second = json.loads(chat.messages[i + 3]["tool_calls"][0]["function"]["arguments"])
            assert any(value in returned for value in leaves(second))
    assert seen > 5


def test_polite_requests_keep_their_words() -> None:
    rng = random.Random(5)
    asked = [polite(rng, "Read docs/notes.txt.") for _ in range(200)]
    assert all("ead docs/notes.txt" in text for text in asked)
    assert len(set(asked)) > 5
