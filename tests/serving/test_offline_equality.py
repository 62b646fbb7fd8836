"""The offline API asks the engine for what the server asks it for, and refuses in its words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leadline.config.server import ChatConfig
from leadline.core.errors import BadRequest
from leadline.core.request import SamplingParams, StructuredOutputs
from leadline.offline.options import read_options
from leadline.offline.prompts import PromptEncoder
from leadline.text.tokenizer import Tokenizer
from tests.serving.conftest import HELLO, MakeRig

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**FUNCTION["function"], "strict": True}}  # type: ignore[dict-item]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
HISTORY: list[Any] = [
    {"role": "system", "content": "Be <think> brief."},
    *HELLO,
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
    {"role": "user", "content": [{"type": "text", "text": "And?"}]},
]
STARTED = [*HELLO, {"role": "assistant", "content": "It is"}]
CHATS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "plain": (HELLO, {}),
    "history": (HISTORY, {"tools": [FUNCTION]}),
    "reasoning dropped": (HISTORY, {"chat_template_kwargs": {"drop_thinking": True}}),
    "chat mode": (HELLO, {"chat_template_kwargs": {"thinking": False}}),
    "effort": (HELLO, {"chat_template_kwargs": {"reasoning_effort": "max"}}),
    "effort none": (HELLO, {"chat_template_kwargs": {"reasoning_effort": "none"}}),
    "task": (HELLO, {"chat_template_kwargs": {"task": "title"}}),
    "strict": (HELLO, {"tools": [STRICT], "parallel_tool_calls": False}),
    "required": (HELLO, {"tools": [FUNCTION], "tool_choice": "required"}),
    "none": (HELLO, {"tools": [FUNCTION], "tool_choice": "none"}),
    "named": (
        HELLO,
        {
            "tools": [FUNCTION],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "chat_template_kwargs": {"thinking": False},
        },
    ),
    "continued": (STARTED, {"continue_final_message": True}),
    "no turn opened": (HELLO, {"add_generation_prompt": False}),
}


@pytest.mark.parametrize(("messages", "fields"), CHATS.values(), ids=CHATS)
def test_c63_chats_ask_for_the_same(
    rig: MakeRig, tokenizer: Tokenizer, messages: list[Any], fields: dict[str, Any]
) -> None:
    server = rig("Yes.")
    server.chat(messages=messages, **fields)
    [asked] = server.engine.requests
    own = PromptEncoder(tokenizer, ChatConfig(), 8192).chat(messages, None, **fields).request
    assert own == replace(asked, request_id="")


@pytest.mark.parametrize(
    "options",
    [
        {"default_chat_template_kwargs": {"thinking": False}},
        {"default_chat_template_kwargs": {"reasoning_effort": 12}},
        {"tool_strict_level": "parameter"},
        {"effort_profile": "v4", "v4_inline_system": "reminder"},
        {"default_max_tokens": "77"},
        {"override_generation_config": {"temperature": 0.25, "top_k": 3, "max_new_tokens": 5}},
    ],
    ids=lambda options: ", ".join(options),
)
def test_c63_options_are_the_servers_flags(
    rig: MakeRig, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    server = rig("Yes.", **options)
    messages = [*HISTORY, {"role": "system", "content": "In French."}, *HELLO]
    server.chat(messages=messages, tools=[FUNCTION])
    _, chat_config = read_options("m", options)
    own = PromptEncoder(tokenizer, chat_config, 8192).chat(messages, None, tools=[FUNCTION])
    assert own.request == replace(server.engine.requests[0], request_id="")
    server.post("/v1/completions", prompt="a")
    raw = PromptEncoder(tokenizer, chat_config, 8192).completion("a", None, param="prompt")
    assert raw.request == replace(server.engine.requests[1], request_id="")


def test_c63_a_checkpoint_brings_its_sampling_here_and_there(
    rig: MakeRig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v41"}', encoding="utf-8")
    own = '{"temperature": 0.25, "top_k": 3, "eos_token_id": [1, 9]}'
    (tmp_path / "generation_config.json").write_text(own, encoding="utf-8")
    server = rig("Yes.", folder=tmp_path)
    server.chat()
    asked = server.engine.requests[0].sampling
    assert (asked.temperature, asked.top_k, asked.stop_token_ids) == (0.25, 3, (1, 9))
    here = PromptEncoder(tokenizer, ChatConfig(), 8192, tmp_path)
    assert here.chat(HELLO, None).request.sampling == asked
    explicit = here.chat(HELLO, SamplingParams(temperature=0.5)).request.sampling
    assert explicit == SamplingParams(temperature=0.5, stop_token_ids=(1, 9))


def test_c63_sampling_that_text_needs_asks_for_the_same(rig: MakeRig, tokenizer: Tokenizer) -> None:
    server = rig("Yes.")
    params = SamplingParams(
        max_tokens=9,
        bad_words=("no", "never"),
        thinking_token_budget=4,
        structured_outputs=StructuredOutputs(regex="Y.*"),
    )
    server.chat(
        max_tokens=9,
        bad_words=["no", "never"],
        thinking_token_budget=4,
        structured_outputs={"regex": "Y.*"},
    )
    own = PromptEncoder(tokenizer, ChatConfig(), 8192).chat(HELLO, params).request
    assert own == replace(server.engine.requests[0], request_id="", sampling=params)
    server.post("/v1/completions", prompt="a", structured_outputs={"regex": "Y.*"})
    raw = SamplingParams(structured_outputs=StructuredOutputs(regex="Y.*"))
    own = PromptEncoder(tokenizer, ChatConfig(), 8192).completion("a", raw, param="prompt").request
    assert own == replace(server.engine.requests[1], request_id="", sampling=raw)


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([], {}),
        ([{"role": "robot", "content": "a"}], {}),
        (HELLO, {"tool_choice": "required"}),
        (HELLO, {"tools": [FUNCTION, FUNCTION]}),
        (HELLO, {"tools": [FUNCTION], "tool_choice": "perhaps"}),
        (HELLO, {"tools": [{"type": "web_search"}]}),
        (HELLO, {"chat_template_kwargs": {"thinking": "yes"}}),
        (HELLO, {"chat_template_kwargs": {"reasoning_effort": "huge"}}),
        (HELLO, {"chat_template_kwargs": {"task": "dance"}}),
        (STARTED, {"continue_final_message": True, "add_generation_prompt": True}),
        ([{"role": "user", "content": "word " * 9000}], {}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_c63_chats_are_refused_in_the_same_words(
    rig: MakeRig, tokenizer: Tokenizer, messages: list[Any], fields: dict[str, Any]
) -> None:
    error = rig("Yes.").refuse("/v1/chat/completions", messages=messages, **fields)
    with pytest.raises(BadRequest) as caught:
        PromptEncoder(tokenizer, ChatConfig(), 8192).chat(messages, None, **fields)
    assert (str(caught.value), caught.value.param) == (error["message"], error["param"])


@pytest.mark.parametrize(
    "prompt", ["", [5] * 9000, "word " * 9000], ids=["empty", "long ids", "long text"]
)
def test_c63_prompts_are_refused_in_the_same_words(
    rig: MakeRig, tokenizer: Tokenizer, prompt: Any
) -> None:
    error = rig("Yes.").refuse("/v1/completions", prompt=prompt)
    with pytest.raises(BadRequest) as caught:
        PromptEncoder(tokenizer, ChatConfig(), 8192).completion(prompt, None, param="prompt")
    assert (str(caught.value), caught.value.param) == (error["message"], error["param"])
