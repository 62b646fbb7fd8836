"""Prompts of the Responses and Messages dialects against the model maker's own conversion."""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe as recipe
import pytest

from leadline.text.tokenizer import Tokenizer
from tests.serving.conftest import MakeRig
from tests.serving.test_messages import WEATHER as MESSAGES_WEATHER
from tests.serving.test_responses import WEATHER as RESPONSES_WEATHER

_SPECIAL = recipe.SpecialTokens(image="<｜deepseek_image｜>")


def expected_ids(
    request_type: type[recipe.ResponsesRequest] | type[recipe.MessagesRequest],
    body: dict[str, Any],
    tokenizer: Tokenizer,
) -> tuple[int, ...]:
    """Prompt ids of a body by the library alone."""
    options = recipe.ConversionOptions(default_thinking_mode=True).with_special_tokens(_SPECIAL)
    raw = json.dumps({"model": "DeepSeek-V4.1-Flash"} | body).encode()
    encoding = (
        recipe.DeepseekV41Encoding()
        .with_tokenizer(recipe.Tokenizer.from_file(str(tokenizer.path)))
        .with_special_tokens(_SPECIAL)
    )
    return tuple(encoding.encode(request_type(raw).convert(options).conversation))


RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"input": "Weather in Oslo?"},
    "instructions": {"input": "Hi", "instructions": "Be brief."},
    "low": {"input": "Hi", "reasoning": {"effort": "low"}},
    "chat": {"input": "Hi", "reasoning": {"effort": "none"}},
    "developer": {
        "input": [{"role": "developer", "content": "D"}, {"role": "user", "content": "U"}]
    },
    "schema": {
        "input": "Hi",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    },
    "calls": {
        "instructions": "Be brief.",
        "tools": [RESPONSES_WEATHER],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Look."}],
            },
            {
                "type": "function_call",
                "call_id": "a",
                "name": "get_weather",
                "arguments": '{"city": "Oslo", "days": 3}',
            },
            {"type": "function_call_output", "call_id": "a", "output": "3 degrees"},
        ],
    },
    "namespace": {
        "input": "Hi",
        "tools": [
            {
                "type": "namespace",
                "name": "fs",
                "description": "Files.",
                "tools": [{"type": "function", "name": "read", "description": "Reads."}],
            }
        ],
    },
}


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(rig: MakeRig, name: str) -> None:
    server = rig("x")
    server.post("/v1/responses", **RESPONSES[name])
    wanted = expected_ids(recipe.ResponsesRequest, RESPONSES[name], server.tokenizer)
    assert server.engine.requests[0].prompt_token_ids == wanted


MESSAGES: dict[str, dict[str, Any]] = {
    "text": {"messages": [{"role": "user", "content": "Weather in Oslo?"}]},
    "system": {
        "system": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
        "messages": [{"role": "user", "content": "Hi"}],
    },
    "disabled": {
        "thinking": {"type": "disabled"},
        "messages": [{"role": "user", "content": "Hi"}],
    },
    "effort": {
        "output_config": {"effort": "max"},
        "messages": [{"role": "user", "content": "Hi"}],
    },
    "calls": {
        "system": "Be brief.",
        "tools": [MESSAGES_WEATHER],
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Look.", "signature": "s"},
                    {"type": "text", "text": "On it."},
                    {
                        "type": "tool_use",
                        "id": "a",
                        "name": "get_weather",
                        "input": {"city": "Oslo", "days": 3},
                    },
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "3 degrees"},
                    {"type": "text", "text": "And tomorrow?"},
                ],
            },
        ],
    },
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(rig: MakeRig, name: str) -> None:
    server = rig("x")
    body = {"max_tokens": 2000} | MESSAGES[name]
    server.post("/v1/messages", **body)
    wanted = expected_ids(recipe.MessagesRequest, body, server.tokenizer)
    assert server.engine.requests[0].prompt_token_ids == wanted
