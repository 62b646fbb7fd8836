"""Deltas of a chat: any tokens at all, cut anywhere, give the same answer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.core.request import FinishReason, SamplingParams, TokenOutput
from leadline.text.encoding import ChatEncoder
from leadline.text.output_parser import Delta, OutputParser
from leadline.text.tokenizer import Tokenizer

TOOL: Any = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="session")
def encoder(tokenizer: Tokenizer) -> ChatEncoder:
    return ChatEncoder(tokenizer)


def parse(
    encoder: ChatEncoder,
    steps: list[list[int]],
    *,
    reason: FinishReason = FinishReason.LENGTH,
    thinking: bool = True,
    tools: Any = (TOOL,),
    sampling: SamplingParams | None = None,
) -> tuple[OutputParser, list[Delta]]:
    messages = [{"role": "user", "content": "Hi"}]
    prompt = encoder.encode(messages, thinking=thinking, tools=tools)
    parser = OutputParser(encoder, prompt, sampling or SamplingParams())
    deltas: list[Delta] = []
    for step in steps:
        deltas += parser.push(TokenOutput("r", tuple(step)))
    if parser.finish_reason is None:
        deltas += parser.push(TokenOutput("r", finish_reason=reason))
    return parser, deltas


def joined(deltas: list[Delta]) -> tuple[str, str, list[str]]:
    """Content, reasoning, and arguments by call."""
    calls: dict[int, str] = {}
    for delta in deltas:
        for call in delta.tool_calls or ():
            calls[call.index] = calls.get(call.index, "") + call.function.arguments
    content = "".join(delta.content or "" for delta in deltas)
    return content, "".join(delta.reasoning_content or "" for delta in deltas), list(calls.values())


@given(
    ids=st.lists(st.integers(0, 1100), max_size=60),  # past the vocabulary too: a model has more
    size=st.integers(1, 7),
    thinking=st.booleans(),
)
def test_any_tokens_parse_the_same_for_any_cut(
    encoder: ChatEncoder, ids: list[int], size: int, thinking: bool
) -> None:
    whole, all_at_once = parse(encoder, [ids], thinking=thinking)
    cut = [ids[i : i + size] for i in range(0, len(ids), size)]
    parts, piecewise = parse(encoder, cut, thinking=thinking)
    assert joined(piecewise) == joined(all_at_once)
    assert parts.finish_reason == whole.finish_reason == "length"
    assert parts.num_tokens == len(ids)
    assert parts.num_reasoning_tokens == whole.num_reasoning_tokens <= len(ids)


@given(ids=st.lists(st.integers(3, 900), max_size=40))
def test_ordinary_tokens_lose_no_byte(encoder: ChatEncoder, ids: list[int]) -> None:
    _, deltas = parse(encoder, [ids], thinking=False, tools=())
    # Leading newlines of an answer are not part of it (3.2).
    assert joined(deltas)[0].lstrip("\n") == encoder.tokenizer.decode(ids).lstrip("\n")


def test_closing_marker_spelled_by_ordinary_tokens_is_text(encoder: ChatEncoder) -> None:
    ids = [*encoder.tokenizer.encode("a</"), *encoder.tokenizer.encode("think>b")]
    assert joined(parse(encoder, [ids])[1]) == ("", "a</think>b", [])


def test_reasoning_tokens_are_those_before_the_marker(encoder: ChatEncoder) -> None:
    reasoning = encoder.tokenizer.encode("\n\nhm 😀")
    ids = [*reasoning, *encoder.tokenizer.encode("</think>and</think>so")]
    assert parse(encoder, [ids])[0].num_reasoning_tokens == len(reasoning)
    assert parse(encoder, [ids], thinking=False)[0].num_reasoning_tokens == 0


def test_stop_string_in_reasoning_or_arguments_is_no_stop(encoder: ChatEncoder) -> None:
    text = (
        'xSx</think>a<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
        '<｜DSML｜ parameter name="p" string="true">S</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    parser, deltas = parse(
        encoder,
        [encoder.tokenizer.encode(text)],
        reason=FinishReason.STOP,
        sampling=SamplingParams(stop=("S",)),
    )
    assert joined(deltas) == ("a", "xSx", ['{"p": "S"}'])
    assert parser.finish_reason == "tool_calls"


def test_begun_stop_string_is_released_before_a_call(encoder: ChatEncoder) -> None:
    text = '</think>a S<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>'
    _, deltas = parse(
        encoder,
        [encoder.tokenizer.encode(text)],
        reason=FinishReason.STOP,
        sampling=SamplingParams(stop=("STOP",)),
    )
    assert joined(deltas) == ("a S", "", ["{}"])
    assert [delta.tool_calls is not None for delta in deltas] == sorted(
        delta.tool_calls is not None for delta in deltas
    )
