"""Prompt ids that were computed elsewhere (serving-api 1.2, 2.10)."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from leadline.text.chat import ChatInput, ResponseFormat, Tool
from leadline.text.encoding import ChatEncoder
from leadline.text.profiles import V4, V41
from leadline.text.tokenizer import Tokenizer

S: Any = {"role": "system", "content": "You are helpful."}
U: Any = {"role": "user", "content": "Weather in Oslo?"}
T = Tool(
    "get_weather",
    "Get the weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["city"],
    },
)
A: Any = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "I should call the tool.",
    "tool_calls": [
        {"id": "1", "function": {"name": T.name, "arguments": '{"city": "Oslo", "n": 3}'}}
    ],
}
R: Any = {"role": "tool", "tool_call_id": "1", "content": "3 degrees"}
COLD: Any = {"role": "assistant", "content": "Cold.", "reasoning_content": "hm"}
BRIEF: Any = {"role": "system", "content": "Be brief."}
SCHEMA: Any = {"type": "object", "properties": {"t": {"type": "integer"}}}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


CASES = {
    "a": ChatInput([U], thinking=False),
    "b": ChatInput([S, U]),
    "c": ChatInput([S, U], tools=(T,)),
    "d": ChatInput([S, U, A, R], tools=(T,)),
    "e": ChatInput([S, U, A, R, user("Thanks")], tools=(T,), thinking=False),
    "f": ChatInput([S, U, COLD, BRIEF, user("And Rome?")]),
    "g": ChatInput([U, {"role": "assistant", "content": "It is", "prefix": True}], thinking=False),
    "h": ChatInput([S, U], response_format=ResponseFormat("json_schema", SCHEMA)),
}
WANT = {
    "a": ("8 92f419750f5711f2", "8 92f419750f5711f2"),
    "b": ("91 f4e55067eebb2396", "38 cdf277e5872bf353"),
    "c": ("366 b61a5f2482efd0d6", "303 8b70f2ca4a81fb68"),
    "d": ("448 c760e7c4a27c3d1a", "379 3f3d3503ce59d422"),
    "e": ("363 b6d0d13e88c04544", "348 b07ee7147feede96"),
    "f": ("103 ea59db746829bb19", "51 cc2bb365c836e931"),
    "g": ("10 c85b69848a3687cb", "10 c85b69848a3687cb"),
    "h": ("125 2e88a1e7e00f84eb", "72 6be58be6eb75e82d"),
}


def digest(token_ids: tuple[int, ...]) -> str:
    joined = ",".join(map(str, token_ids))
    return f"{len(token_ids)} {hashlib.sha256(joined.encode()).hexdigest()[:16]}"


@pytest.mark.parametrize("case", CASES)
def test_c68_check_values(v4_tokenizer: Tokenizer, v41_tokenizer: Tokenizer, case: str) -> None:
    encoders = (ChatEncoder(v4_tokenizer, V4), ChatEncoder(v41_tokenizer, V41))
    assert tuple(digest(e.encode(CASES[case]).token_ids) for e in encoders) == WANT[case]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("<think>", [30, 37947, 32]),
        (
            "x<｜Assistant｜></think>y",
            [90, 30, 28217, 88031, 28217, 7339, 37947, 32, 91],
        ),
    ],
    ids=["think", "assistant"],
)
def test_c1_typed_markers_are_ordinary_ids(
    v4_tokenizer: Tokenizer, text: str, want: list[int]
) -> None:
    prompt = ChatEncoder(v4_tokenizer, V4).encode(ChatInput([user(text)], thinking=False))
    assert prompt.token_ids == (0, 128803, *want, 128804, 128822)
