from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leadline.config.server import ChatConfig
from leadline.core.errors import BadRequest, ConfigError
from leadline.core.request import Constraint, SamplingParams, StructuredOutputs, ThinkingBudget
from leadline.offline.prompts import PromptEncoder
from leadline.text import grammar
from leadline.text.chat import AnswerStart, ChatInput, Tool, ToolChoice
from leadline.text.encoding import ChatEncoder
from leadline.text.markers import DSML, THINK_END
from leadline.text.profiles import V41_TAGS
from leadline.text.tokenizer import Tokenizer

YES_OR_NO = StructuredOutputs(choice=("yes", "no"))
HI = [{"role": "user", "content": "hi"}]
FUNCTION: dict[str, Any] = {
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
WEATHER = {"type": "function", "function": {**FUNCTION, "strict": True}}
TOOL = Tool(**FUNCTION, strict=True)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> PromptEncoder:
    return PromptEncoder(tokenizer, ChatConfig(), 2000)


@pytest.mark.parametrize("model_type", ["deepseek_v41", "deepseek_v4"])
def test_c6_the_checkpoint_decides_the_chat_format(
    tokenizer: Tokenizer, tmp_path: Path, model_type: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    query = PromptEncoder(tokenizer, ChatConfig(), 2000, tmp_path).chat(HI, None)
    prompt = tokenizer.decode(query.request.prompt_token_ids)
    assert ("<｜System｜>" in prompt) == (model_type == "deepseek_v41")
    assert ("Absolute maximum" in prompt) == (model_type == "deepseek_v4")


def test_c6_a_preset_has_its_models_chat_format(tokenizer: Tokenizer) -> None:
    query = PromptEncoder(tokenizer, ChatConfig(), 2000, preset="tiny-v4").chat(HI, None)
    assert "Absolute maximum" in tokenizer.decode(query.request.prompt_token_ids)


def test_plain_prompts_ask_for_no_constraint(prompts: PromptEncoder) -> None:
    request = prompts.completion("hello", None, param="prompt").request
    assert (request.constraint, request.bad_token_ids, request.thinking_budget) == (None, (), None)
    assert request.sampling == SamplingParams()


@pytest.mark.parametrize("form", ["hello", {"prompt": "hello"}, {"prompt_token_ids": [7, 8]}])
def test_c42_structured_outputs_hold_at_once_in_raw_prompts(
    prompts: PromptEncoder, form: Any
) -> None:
    sampling = SamplingParams(structured_outputs=YES_OR_NO, thinking_token_budget=3)
    request = prompts.completion(form, sampling, param="prompt").request
    assert request.constraint == Constraint(at_once=grammar.content_constraint(YES_OR_NO))
    assert request.thinking_budget is None  # no reasoning is open


@pytest.mark.parametrize(
    "text", ["<think>", "a</think>b<think>\nWell,"], ids=["opened", "opened again"]
)
def test_c42_in_raw_prompts_that_opened_reasoning_it_is_free(
    prompts: PromptEncoder, tokenizer: Tokenizer, text: str
) -> None:
    sampling = SamplingParams(structured_outputs=YES_OR_NO, thinking_token_budget=3)
    request = prompts.completion(text, sampling, param="prompt").request
    end, answer = tokenizer.marker_id(THINK_END), grammar.content_constraint(YES_OR_NO)
    assert answer is not None
    assert request.constraint == Constraint(after=((end, answer),))
    assert request.thinking_budget == ThinkingBudget(3, end)


def test_bad_words_become_ids(prompts: PromptEncoder, tokenizer: Tokenizer) -> None:
    request = prompts.completion("a", SamplingParams(bad_words=("no",)), param="prompt").request
    assert request.bad_token_ids == grammar.bad_token_ids(("no",), tokenizer)
    assert tuple(tokenizer.encode("no")) in request.bad_token_ids


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(structured_outputs=YES_OR_NO),
        SamplingParams(bad_words=("no",)),
        SamplingParams(thinking_token_budget=0),
    ],
    ids=["structured outputs", "bad words", "budget"],
)
def test_what_needs_a_tokenizer_says_so(sampling: SamplingParams) -> None:
    with pytest.raises(ConfigError, match="this LLM has no tokenizer"):
        PromptEncoder(None, ChatConfig(), 100).completion([5], sampling, param="prompt")


def test_prompts_that_are_only_scored_may_fill_the_context(prompts: PromptEncoder) -> None:
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    assert prompts.completion([5] * 2000, scored, param="prompt")
    with pytest.raises(BadRequest, match="2001 tokens") as caught:
        prompts.completion([5] * 2001, scored, param="prompt")
    assert caught.value.code == "context_length_exceeded"


CHATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "chat mode": ({"chat_template_kwargs": {"enable_thinking": False}}, {"thinking": False}),
    "effort": (
        {"chat_template_kwargs": {"thinking": True, "reasoning_effort": "max"}},
        {"thinking": True, "reasoning_effort": "max"},
    ),
    "task": ({"chat_template_kwargs": {"task": "title"}}, {"task": "title"}),
    "kept reasoning": (
        {"chat_template_kwargs": {"drop_thinking": False}},
        {"drop_thinking": False},
    ),
    "tools": ({"tools": [WEATHER]}, {"tools": (TOOL,)}),
    "no tool": (
        {"tools": [WEATHER], "tool_choice": "none"},
        {"tools": (TOOL,), "tool_choice": ToolChoice("none")},
    ),
    "named": (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tools": (TOOL,), "tool_choice": ToolChoice("named", "weather", parallel=False)},
    ),
    "required": (
        {
            "tools": [WEATHER],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "chat_template_kwargs": {"thinking": False},
        },
        {
            "tools": (TOOL,),
            "tool_choice": ToolChoice("required", parallel=False),
            "thinking": False,
        },
    ),
    "no turn opened": ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
}


@pytest.mark.parametrize(("fields", "want"), CHATS.values(), ids=CHATS)
def test_c63_chats_are_encoded_and_constrained_as_over_http(
    prompts: PromptEncoder, tokenizer: Tokenizer, fields: Any, want: dict[str, Any]
) -> None:
    messages = [*HI, {"role": "assistant", "content": "Hello", "reasoning": "hm"}, *HI]
    query = prompts.chat(messages, None, **fields)
    prompt = ChatEncoder(tokenizer).encode(ChatInput(messages, **want))
    assert query.request.prompt_token_ids == prompt.token_ids
    assert query.request.constraint == grammar.chat_constraint(
        prompt, tokenizer, None, tags=V41_TAGS
    )
    assert query.request.sampling.max_tokens == prompt.default_max_tokens(2000)
    assert query.text == tokenizer.decode(prompt.token_ids)
    thinks = prompt.start is AnswerStart.REASONING
    assert query.reasoning_end == (tokenizer.marker_id(THINK_END) if thinks else None)


def test_c63_options_of_chats_are_the_servers(tokenizer: Tokenizer) -> None:
    options = ChatConfig(
        default_chat_template_kwargs={"thinking": False}, tool_strict_level="parameter"
    )
    loose = {"type": "function", "function": FUNCTION}
    query = PromptEncoder(tokenizer, options, 2000).chat(HI, None, tools=[loose])
    prompt = ChatEncoder(tokenizer, options=options).encode(ChatInput(HI, (Tool(**FUNCTION),)))
    assert query.request.prompt_token_ids == prompt.token_ids
    assert prompt.start is AnswerStart.CONTENT
    strict = grammar.chat_constraint(
        prompt, tokenizer, None, strict_level="parameter", tags=V41_TAGS
    )
    assert query.request.constraint == strict


def test_c42_chats_take_structured_outputs_beside_tools(
    prompts: PromptEncoder, tokenizer: Tokenizer
) -> None:
    sampling = SamplingParams(structured_outputs=YES_OR_NO, thinking_token_budget=9)
    request = prompts.chat(HI, sampling, tools=[WEATHER]).request
    assert request.constraint is not None
    triggers = [trigger for trigger, _ in request.constraint.after]
    assert triggers == [tokenizer.marker_id(THINK_END), tokenizer.marker_id(DSML)]
    assert request.thinking_budget == ThinkingBudget(9, tokenizer.marker_id(THINK_END))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice asks for a call, but tools is empty"),
        ({"tool_choice": "perhaps"}, "tool_choice is 'perhaps'; it must be none, auto"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type is 'web_search'"),
        ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs.thinking is 'yes'"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "exclude each other"),
    ],
    ids=["no tools", "choice", "tool", "thinking", "continued and opened"],
)
def test_wrong_fields_of_chats_are_named(prompts: PromptEncoder, fields: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        prompts.chat(HI, None, **fields)


def test_c54_chats_that_are_too_long_say_what_agents_look_for(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match=r"prompt is too long: .* shorten messages") as caught:
        PromptEncoder(tokenizer, ChatConfig(), 4).chat(HI, None)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
