"""Any JSON value in any place of a body is served or refused, never a failure (item 96)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.conftest import MakeRig
from tests.serving.test_chat import TOOLS
from tests.serving.test_messages import WEATHER as MESSAGES_WEATHER
from tests.serving.test_responses import PATCH, WEATHER

ODD: tuple[Any, ...] = (None, True, -1, 1.5, "x", [], [1], {}, {"type": [1], "name": {}}, [{}])

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [TOOLS[0]]},
            },
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
            "reasoning": {"effort": "low"},
            "thinking": {"type": "enabled"},
            "chat_template_kwargs": {"task": None, "thinking": True, "drop_thinking": False},
            "task": None,
            "logit_bias": {"5": 1},
            "stop": ["a"],
            "stream_options": {"include_usage": True},
        },
    ),
    "chat-regex": (
        "/v1/chat/completions",
        {"messages": [], "response_format": {"type": "regex", "pattern": "a"}},
    ),
    "completions": (
        "/v1/completions",
        {"prompt": ["a"], "suffix": "b", "structured_outputs": {"choice": ["a"]}, "logprobs": 1},
    ),
    "tokenize": ("/tokenize", {"prompt": "a", "add_special_tokens": True}),
    "detokenize": ("/detokenize", {"tokens": [5]}),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "summary": [{"text": "a"}], "content": [{"text": "b"}]},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "1"},
                {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "x"},
            ],
            "tools": [
                WEATHER,
                PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": "d"}},
                {"type": "namespace", "name": "n", "description": "d", "tools": [WEATHER]},
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "get_weather"}],
            },
            "text": {"format": {"type": "json_schema", "schema": {}}},
            "reasoning": {"effort": "low"},
            "include": ["a"],
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "max_tokens": 2000,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "document", "title": "t", "source": {"type": "text", "data": ""}},
                        {
                            "type": "search_result",
                            "title": "t",
                            "source": "s",
                            "content": [{"type": "text", "text": "f"}],
                        },
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t"},
                        {"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": "r"}],
                },
            ],
            "tools": [MESSAGES_WEATHER],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
            "metadata": {"user_id": "u"},
        },
    ),
}


def variants(value: Any) -> Iterator[Any]:
    """``value`` with an odd one in the place of each of its parts."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, part in items:
        for odd in ODD:
            yield _with(value, key, odd)
        if isinstance(part, dict | list):
            for changed in variants(part):
                yield _with(value, key, changed)


def _with(value: Any, key: Any, part: Any) -> Any:
    changed = copy.copy(value)
    changed[key] = part
    return changed


@pytest.mark.parametrize("name", BODIES)
def test_item_96_an_odd_value_anywhere_is_served_or_refused(rig: MakeRig, name: str) -> None:
    path, body = BODIES[name]
    server = rig("a</think>b")
    for changed in variants(body):
        reply = server.http.post(path, json=changed)
        assert reply.status_code < 500, changed
