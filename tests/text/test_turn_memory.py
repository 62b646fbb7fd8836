"""Turns that come back with their calls are rendered as they were sampled (C12)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from leadline.text.chat import AnswerStart, ChatInput, SampledTurn
from leadline.text.encoding import ChatEncoder
from leadline.text.profiles import PROFILES, V4, V41, Profile
from leadline.text.tokenizer import Tokenizer
from leadline.text.turn_memory import TurnMemory
from tests.text.prompts import EOS, HI, TOOL, calls, in_v4, result

OPENED = "\n\n<｜DSML｜ calls>\n"
CALL = (
    '<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="false">[1,  2]'
    "</｜DSML｜ parameter></｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
SAME = '{"a":[1,2]}'


def sampled_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """A spelling that no encoder would choose: plain characters one by one."""
    marker = "｜DSML｜"
    pieces = re.findall(f"{marker}|.", text, re.DOTALL)
    return tuple(token_id for piece in pieces for token_id in tokenizer.encode(piece))


@pytest.fixture
def turn(tokenizer: Tokenizer) -> SampledTurn:
    ids = sampled_ids(tokenizer, OPENED + CALL)
    return SampledTurn(ids, "", (("1", "f", '{"a": [1,  2]}'),))


@pytest.fixture(params=["v41", "v4"])
def encoder(request: pytest.FixtureRequest, tokenizer: Tokenizer, turn: SampledTurn) -> ChatEncoder:
    encoder = ChatEncoder(tokenizer, PROFILES[request.param])
    encoder.remember(turn, "me")
    return encoder


def prompt(encoder: ChatEncoder, message: Any, tenant: str | None = "me") -> tuple[int, ...]:
    chat = ChatInput([HI, message, result("1", "R")], tools=(TOOL,))
    return encoder.encode(chat, tenant=tenant).token_ids


def contains(ids: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(ids[i : i + len(part)] == part for i in range(len(ids)))


@pytest.mark.parametrize(
    "arguments", [SAME, '{"a": [1.0, 2]}', {"a": [1, 2]}], ids=["text", "float", "object"]
)
def test_c12_the_same_call_gives_the_sampled_ids(
    encoder: ChatEncoder, turn: SampledTurn, arguments: Any
) -> None:
    ids = prompt(encoder, calls("1", arguments=arguments, reasoning_content="why"))
    assert contains(ids, turn.token_ids)
    text = encoder.tokenizer.decode(ids)
    assert f"<think>why</think>{OPENED}{CALL}{EOS}<｜User｜><tool_result>R<" in text


@pytest.mark.parametrize(
    "message",
    [
        calls("1", arguments='{"a": [1, 3]}'),
        calls("1", arguments='{"a": [true, 2]}'),
        calls("1", arguments='{"a": [1, 2.5]}'),
        calls("1", arguments="{bad"),
        calls("1", arguments=SAME, content="Look:"),
        calls("2", arguments=SAME),
        calls("1", "2", arguments=SAME),
    ],
    ids=["argument", "bool", "number", "bad", "content", "id", "second"],
)
def test_c12_another_call_is_canonical(
    encoder: ChatEncoder, turn: SampledTurn, message: Any
) -> None:
    ids = prompt(encoder, message)
    assert not contains(ids, turn.token_ids)
    assert ids == prompt(ChatEncoder(encoder.tokenizer, encoder.profile), message)


@pytest.mark.parametrize("tenant", ["other", None], ids=str)
def test_c12_turns_are_their_tenants(
    encoder: ChatEncoder, turn: SampledTurn, tenant: str | None
) -> None:
    assert not contains(prompt(encoder, calls("1", arguments=SAME), tenant), turn.token_ids)


@pytest.mark.parametrize(
    ("profile", "opened"), [(V41, OPENED), (V4, in_v4(OPENED))], ids=["v41", "v4"]
)
def test_c12_a_block_that_the_prompt_opened_belongs_to_the_turn(
    tokenizer: Tokenizer, profile: Profile, opened: str
) -> None:
    encoder = ChatEncoder(tokenizer, profile)
    rest = sampled_ids(tokenizer, CALL)
    turn = SampledTurn(rest, "", (("1", "f", SAME),))
    encoder.remember(turn, "me", start=AnswerStart.TOOL_BLOCK)
    ids = prompt(encoder, calls("1", arguments=SAME))
    assert contains(ids, (*tokenizer.encode(opened), *rest))


def test_two_calls_come_back_together(tokenizer: Tokenizer) -> None:
    memory = TurnMemory()
    both = [("1", "f", "{}"), ("2", "f", '{"b": 1, "a": 2}')]
    memory.put(None, "text", both, [7, 8])
    again = [("1", "f", "{ }"), ("2", "f", '{"a": 2, "b": 1}')]
    found = memory.get(None, "text", again)
    assert found is not None
    assert list(found) == [7, 8]
    assert memory.get(None, "text", again[:1]) is None
    assert memory.get(None, "text", again[::-1]) is None


def test_the_turn_used_least_recently_is_forgotten() -> None:
    memory = TurnMemory(max_turns=2)
    a, b, c = ([(name, "f", "{}")] for name in "abc")
    memory.put(None, "", a, [1])
    memory.put(None, "", b, [2])
    assert memory.get(None, "", a) is not None
    memory.put(None, "", c, [3])
    assert memory.get(None, "", b) is None
    assert memory.get(None, "", a) is not None


def test_turns_are_forgotten_when_their_ids_are_too_many() -> None:
    memory = TurnMemory(max_token_ids=5)
    a, b, c = ([(name, "f", "{}")] for name in "abc")
    memory.put(None, "", a, [1, 1])
    memory.put(None, "", b, [2, 2])
    memory.put(None, "", b, [3, 3, 3])  # takes the place of the other
    assert memory.get(None, "", a) is not None
    memory.put(None, "", c, [4])
    assert memory.get(None, "", b) is None
    assert memory.get(None, "", a) is not None
    assert memory.get(None, "", c) is not None
