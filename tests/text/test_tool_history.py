"""Calls and results: their order, and what interrupted agents leave behind."""

from __future__ import annotations

from typing import Any

import pytest

from leadline.config.server import ChatConfig
from leadline.core.errors import BadRequest
from leadline.text.chat import ChatInput
from leadline.text.encoding import ChatEncoder
from leadline.text.profiles import V4, V41
from leadline.text.tokenizer import Tokenizer
from tests.text.prompts import EOS, HI, REPLY, calls, render, result

PROFILES = pytest.mark.parametrize("profile", [V41, V4], ids=lambda profile: profile.name)


def results_part(encoder: ChatEncoder, messages: list[Any], **options: Any) -> str:
    """The turn that follows the tool calls."""
    text = render(encoder, messages, thinking=False, **options)
    return text.partition(f"calls>{EOS}")[2].removesuffix("<｜Assistant｜></think>")


def tool_results(*texts: str) -> str:
    return "\n\n".join(f"<tool_result>{text}</tool_result>" for text in texts)


@PROFILES
def test_c13_results_follow_the_order_of_the_calls(tokenizer: Tokenizer, profile: Any) -> None:
    messages = [HI, calls("z", "a"), result("a", "two"), result("z", "one"), HI]
    text = results_part(ChatEncoder(tokenizer, profile), messages)
    assert text == f"<｜User｜>{tool_results('one', 'two')}\n\nHi"


@PROFILES
@pytest.mark.parametrize(
    ("after", "rendered"),
    [
        ([], tool_results("", "")),
        ([HI], f"{tool_results('', '')}\n\nHi"),
        ([result("1", None), result("2", "x")], tool_results("", "x")),
        ([result("2", "two"), HI], f"{tool_results('', 'two')}\n\nHi"),
        ([result("1", "one"), HI], f"{tool_results('one', '')}\n\nHi"),
        ([result("9", "lost"), result("2", "b"), result("1", "a")], tool_results("lost", "a", "b")),
        (
            [result("1", "a"), result("1", "again"), result("2", "b")],
            tool_results("a", "again", "b"),
        ),
        (
            [result("2", "b"), HI, result("1", "a")],
            f"{tool_results('a')}\n\nHi\n\n{tool_results('b')}",
        ),
    ],
    ids=["none", "user", "null", "first", "second", "orphan", "twice", "around-user"],
)
def test_item_83_broken_tool_turns_are_repaired(
    tokenizer: Tokenizer, profile: Any, after: list[Any], rendered: str
) -> None:
    messages = [HI, calls("1", "2"), *after]
    assert results_part(ChatEncoder(tokenizer, profile), messages) == f"<｜User｜>{rendered}"


@PROFILES
def test_item_83_an_orphan_without_any_call_stays(tokenizer: Tokenizer, profile: Any) -> None:
    text = render(ChatEncoder(tokenizer, profile), [HI, result("1", "R")], thinking=False)
    assert text == "<｜User｜>Hi\n\n<tool_result>R</tool_result><｜Assistant｜></think>"


def test_calls_that_end_a_conversation_may_be_open(encoder: ChatEncoder) -> None:
    text = render(encoder, [HI, calls("1")], thinking=False, add_generation_prompt=False)
    assert text.endswith(f" calls>{EOS}")


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        ([HI, calls("1", "2"), result("1", "R")], "messages[1].tool_calls", "no result .* for 2"),
        ([HI, calls("1"), HI, REPLY], "messages[1].tool_calls", "no result .* for 1"),
        ([HI, result("9", "R")], "messages[1].tool_call_id", "'9' answers no call"),
        (
            [HI, calls("1"), result("1", "R"), result("1", "R")],
            "messages[3].tool_call_id",
            "'1' answers no call",
        ),
    ],
    ids=["missing", "missing-between", "orphan", "twice"],
)
def test_item_83_strict_history_refuses_both(
    tokenizer: Tokenizer, messages: Any, param: str, message: str
) -> None:
    strict = ChatEncoder(tokenizer, V41, ChatConfig(strict_tool_history=True))
    with pytest.raises(BadRequest, match=message) as caught:
        strict.encode(ChatInput(messages))
    assert caught.value.param == param


def test_strict_history_takes_whole_turns(tokenizer: Tokenizer, encoder: ChatEncoder) -> None:
    strict = ChatEncoder(tokenizer, V41, ChatConfig(strict_tool_history=True))
    chat = ChatInput([HI, calls("1", "2"), result("2", "b"), result("1", "a"), HI])
    assert strict.encode(chat) == encoder.encode(chat)


def test_item_83_thousands_of_missing_results_take_no_time(encoder: ChatEncoder) -> None:
    names = [str(i) for i in range(4000)]
    answers = [result(name, name) for name in reversed(names) if name.endswith("7")]
    text = results_part(encoder, [HI, calls(*names), *answers])
    expected = tool_results(*[name if name.endswith("7") else "" for name in names])
    assert text == f"<｜User｜>{expected}"
