"""Chat prompts: what clients send in many spellings renders as one prompt."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from leadline.config.server import ChatConfig
from leadline.core.errors import BadRequest, ConfigError
from leadline.text.chat import (
    AnswerStart,
    ChatInput,
    ResponseFormat,
    Tool,
    ToolChoice,
)
from leadline.text.encoding import ChatEncoder
from leadline.text.profiles import V4, V41, Profile
from leadline.text.tokenizer import Tokenizer
from tests.text.prompts import EOS, HI, REPLY, TOOL, both_profiles, calls, render, result, system

FORCED = (ToolChoice("required"), ToolChoice("named", "f"))


@pytest.mark.parametrize("marker", ["<｜System｜>", "<｜title｜>", "</think>"])
def test_c3_missing_marker_is_named_at_start(
    tokenizer: Tokenizer, tmp_path: Path, marker: str
) -> None:
    content = json.loads(tokenizer.path.read_text(encoding="utf-8"))
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != marker]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"no token {marker}"):
        ChatEncoder(Tokenizer(path))


def test_c3_v4_needs_no_system_marker(v4_tokenizer: Tokenizer) -> None:
    assert ChatEncoder(v4_tokenizer, V4)
    with pytest.raises(ConfigError, match="no token <｜System｜>"):
        ChatEncoder(v4_tokenizer, V41)


@pytest.mark.parametrize("profile", [V41, V4], ids=lambda profile: profile.name)
def test_c1_c17_markers_in_any_text_are_text(tokenizer: Tokenizer, profile: Any) -> None:
    encoder = ChatEncoder(tokenizer, profile)
    markers = [t for t in tokenizer.path.read_text(encoding="utf-8").split('"') if "｜" in t]
    typed = "".join({"<think>", "</think>", *markers})

    def prompt(text: str) -> tuple[int, ...]:
        messages = [
            system(text),
            {"role": "user", "content": text},
            calls("1", arguments=json.dumps({"a": text, text: 1}), reasoning_content=text),
            result("1", text),
            {"role": "assistant", "content": text, "reasoning_content": text},
            {"role": "latest_reminder", "content": text},
            HI,
        ]
        tools = (Tool("f", text, {"type": "object", "properties": {text: {"enum": [text]}}}),)
        return encoder.encode(ChatInput(messages, tools=tools)).token_ids

    controls = set(tokenizer.encode(typed))
    assert [i for i in prompt(typed) if i in controls] == [
        i for i in prompt("plain") if i in controls
    ]
    assert tokenizer.decode(prompt(typed)).count(typed) >= 8
    assert tokenizer.marker_id("<｜deepseek_image｜>") not in prompt(typed)


def test_c4_heads(encoder: ChatEncoder, v4_encoder: ChatEncoder) -> None:
    tail = "<｜User｜>Hi<｜Assistant｜></think>"
    assert render(encoder, [HI], thinking=False) == tail
    assert render(v4_encoder, [HI], thinking=False) == tail
    assert render(encoder, [system("S"), HI], thinking=False) == f"<｜System｜>S{tail}"
    assert render(v4_encoder, [system("S"), HI], thinking=False) == f"S{tail}"


def test_c9_with_tools_reasoning_stays_and_its_lack_is_shown(
    encoder: ChatEncoder, v4_encoder: ChatEncoder
) -> None:
    bare = {"role": "assistant", "content": "y"}
    for each in (encoder, v4_encoder):
        text = render(each, [HI, REPLY, HI, bare, HI], tools=(TOOL,))
        assert f"<｜Assistant｜><think>why</think>x{EOS}" in text
        assert f"<｜Assistant｜><think></think>y{EOS}" in text
        for options in ({}, {"tools": (TOOL,), "thinking": False}):
            text = render(each, [HI, REPLY, HI, bare, HI], **options)
            assert f"<｜Assistant｜></think>x{EOS}" in text
            assert "why" not in text


@pytest.mark.parametrize(
    ("tools", "drop", "turn"),
    [((), False, "<think>why</think>x"), ((TOOL,), True, "</think>x")],
    ids=["kept", "dropped"],
)
def test_c9_drop_thinking_overrides(
    tokenizer: Tokenizer, tools: Any, drop: bool, turn: str
) -> None:
    want = f"<｜Assistant｜>{turn}{EOS}"
    text = render(ChatEncoder(tokenizer), [HI, REPLY, HI], tools=tools, drop_thinking=drop)
    assert want in text
    defaults = ChatConfig(default_chat_template_kwargs={"drop_thinking": drop})
    text = render(ChatEncoder(tokenizer, V41, defaults), [HI, REPLY, HI], tools=tools)
    assert want in text


@pytest.mark.parametrize(
    ("last", "thinking", "tail", "start"),
    [
        ({"content": "x"}, False, "</think>x", AnswerStart.CONTENT_CONTINUED),
        ({"content": "x"}, True, "<think></think>x", AnswerStart.CONTENT_CONTINUED),
        ({"reasoning": "r"}, True, "<think>r", AnswerStart.REASONING_CONTINUED),
        (
            {"content": "x", "reasoning_content": "r"},
            True,
            "<think>r</think>x",
            AnswerStart.CONTENT_CONTINUED,
        ),
        ({"content": ""}, True, "<think>", AnswerStart.REASONING),
        ({"content": None, "reasoning": "r"}, False, "</think>", AnswerStart.CONTENT),
    ],
    ids=["chat", "thinking", "reasoning", "both", "nothing", "chat-reasoning"],
)
@pytest.mark.parametrize("how", ["prefix", "continue_final_message"])
@pytest.mark.parametrize("profile", [V41, V4], ids=lambda profile: profile.name)
def test_c10_partial_answer_is_continued(
    tokenizer: Tokenizer,
    profile: Any,
    how: str,
    last: Any,
    thinking: bool,
    tail: str,
    start: AnswerStart,
) -> None:
    message: Any = {"role": "assistant"} | last
    if how == "prefix":
        chat = ChatInput([HI, message | {"prefix": True}], thinking=thinking)
    else:
        chat = ChatInput(
            [HI, message],
            thinking=thinking,
            continue_final_message=True,
            add_generation_prompt=False,
        )
    prompt = ChatEncoder(tokenizer, profile).encode(chat)
    assert tokenizer.decode(prompt.token_ids).endswith(f"<｜User｜>Hi<｜Assistant｜>{tail}")
    assert prompt.start is start


@both_profiles
def test_c10_answer_without_prefix_is_closed(encoder: ChatEncoder) -> None:
    messages = [HI, REPLY]
    end = f"<｜User｜>Hi<｜Assistant｜></think>x{EOS}"
    text = render(encoder, messages, thinking=False)
    assert text.endswith(f"{end}<｜Assistant｜></think>")
    assert render(encoder, messages, thinking=False, add_generation_prompt=False).endswith(end)


@both_profiles
@pytest.mark.parametrize(
    "messages",
    [
        [HI | {"prefix": True}],
        [HI, REPLY | {"prefix": True}, HI],
        [HI, calls("1") | {"prefix": True}],
    ],
    ids=["user", "middle", "calls"],
)
def test_c10_prefix_elsewhere_is_refused(encoder: ChatEncoder, messages: Any) -> None:
    with pytest.raises(BadRequest, match="only a last message of the assistant"):
        encoder.encode(ChatInput(messages))


@both_profiles
def test_c10_continuing_and_a_new_turn_exclude_each_other(encoder: ChatEncoder) -> None:
    with pytest.raises(BadRequest, match="exclude each other") as caught:
        encoder.encode(ChatInput([HI, REPLY], continue_final_message=True))
    assert caught.value.param == "continue_final_message"


def test_item_80_system_messages(encoder: ChatEncoder, v4_encoder: ChatEncoder) -> None:
    messages = [
        system("a"),
        {"role": "developer", "content": "b"},
        HI,
        REPLY,
        system("French"),
        HI,
    ]
    tail = f"<｜User｜>Hi<｜Assistant｜></think>x{EOS}"
    assert render(encoder, messages, thinking=False) == (
        f"<｜System｜>a<｜System｜>b{tail}<｜System｜>French<｜User｜>Hi<｜Assistant｜></think>"
    )
    assert render(v4_encoder, messages, thinking=False) == (
        f"a\n\nb\n\nFrench{tail}<｜User｜>Hi<｜Assistant｜></think>"
    )


def test_r3_late_system_may_become_a_reminder(tokenizer: Tokenizer) -> None:
    encoder = ChatEncoder(tokenizer, V4, ChatConfig(v4_inline_system="reminder"))
    messages = [system("a"), system("b"), HI, REPLY, system("French"), HI]
    assert render(encoder, messages, thinking=False) == (
        f"a\n\nb<｜User｜>Hi<｜Assistant｜></think>x{EOS}"
        "<｜latest_reminder｜>French<｜User｜>Hi<｜Assistant｜></think>"
    )


@pytest.mark.parametrize("end", [system("S"), {"role": "latest_reminder", "content": "S"}])
def test_any_last_message_opens_an_answer(encoder: ChatEncoder, end: Any) -> None:
    assert render(encoder, [HI, end], thinking=False).endswith("S<｜Assistant｜></think>")


def test_several_assistants_in_a_row(encoder: ChatEncoder) -> None:
    assert render(encoder, [REPLY, REPLY], thinking=False) == (
        f"<｜Assistant｜></think>x{EOS}" * 2 + "<｜Assistant｜></think>"
    )


@pytest.mark.parametrize("choice", FORCED, ids=lambda choice: choice.mode)
def test_c29_forced_call_opens_the_block(
    encoder: ChatEncoder, v4_encoder: ChatEncoder, choice: ToolChoice
) -> None:
    chat = ChatInput([HI], tools=(TOOL,), tool_choice=choice, thinking=False)
    for each, name in ((encoder, " calls"), (v4_encoder, "tool_calls")):
        prompt = each.encode(chat)
        text = each.tokenizer.decode(prompt.token_ids)
        assert text.endswith(f"<｜Assistant｜></think>\n\n<｜DSML｜{name}>\n")
        assert each.tokenizer.marker_id("｜DSML｜") in prompt.token_ids[-10:]
        assert prompt.start is AnswerStart.TOOL_BLOCK


@both_profiles
@pytest.mark.parametrize("choice", FORCED, ids=lambda choice: choice.mode)
def test_c29_forced_call_lets_the_model_think_first(
    encoder: ChatEncoder, choice: ToolChoice
) -> None:
    prompt = encoder.encode(ChatInput([HI], tools=(TOOL,), tool_choice=choice))
    assert prompt.start is AnswerStart.REASONING
    assert encoder.tokenizer.decode(prompt.token_ids).endswith("<think>")


@both_profiles
def test_item_77_tool_choice_none_shows_no_tools(encoder: ChatEncoder) -> None:
    chat = ChatInput([HI], tools=(TOOL,), tool_choice=ToolChoice("none"))
    prompt = encoder.encode(chat)
    assert prompt.token_ids == encoder.encode(ChatInput([HI])).token_ids
    assert prompt.tools == ()


def test_c14_response_formats(encoder: ChatEncoder, v4_encoder: ChatEncoder) -> None:
    json_object = ResponseFormat("json_object")
    text = render(v4_encoder, [HI], response_format=json_object, thinking=False)
    assert text.startswith(
        "\n\nYou are a helpful assistant designed to output JSON.\n## Response Format:\n\n"
        "Reply with JSON object ONLY.<｜User｜>"
    )
    form = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
    text = render(encoder, [HI], response_format=json_object, thinking=False)
    assert text.startswith(f'<｜System｜>{form}{{"type": "json_object"}}<｜User｜>')
    schema = ResponseFormat("json_schema", {"ü": [2**70, 1e5, None], "a": {}})
    for each, head in ((encoder, "<｜System｜>S"), (v4_encoder, "S")):
        text = render(each, [system("S"), HI], response_format=schema, thinking=False)
        want = '{"ü": [1180591620717411303424, 100000.0, null], "a": {}}'
        assert text.startswith(f"{head}{form}{want}<｜User｜>")
        text = render(each, [HI], response_format=schema, tools=(TOOL,))
        assert f"to invoke tool calls.\n{form}{want}<｜User｜>" in text


def test_response_format_can_stay_out_of_the_prompt(tokenizer: Tokenizer) -> None:
    encoder = ChatEncoder(tokenizer, V41, ChatConfig(response_format_prompt=False))
    for form in (ResponseFormat("json_object"), ResponseFormat("json_schema", {})):
        assert render(encoder, [HI], response_format=form) == render(encoder, [HI])


@both_profiles
@pytest.mark.parametrize("task", ["query", "authority", "domain", "title", "read_url"])
def test_c15_task_takes_the_place_of_the_header(encoder: ChatEncoder, task: str) -> None:
    for chat in (ChatInput([HI], task=task), ChatInput([HI | {"task": task}])):
        prompt = encoder.encode(chat)
        assert encoder.tokenizer.decode(prompt.token_ids).endswith(f"<｜User｜>Hi<｜{task}｜>")
        assert prompt.token_ids[-1] == encoder.tokenizer.marker_id(f"<｜{task}｜>")
        assert prompt.start is AnswerStart.PLAIN


@both_profiles
@pytest.mark.parametrize(("thinking", "marker"), [(True, "<think>"), (False, "</think>")])
def test_c15_action_follows_the_header(encoder: ChatEncoder, thinking: bool, marker: str) -> None:
    text = render(encoder, [HI], task="action", thinking=thinking)
    assert text.endswith(f"<｜User｜>Hi<｜Assistant｜>{marker}<｜action｜>")


@both_profiles
def test_c15_answered_tasks_stay_in_history(encoder: ChatEncoder) -> None:
    messages = [HI | {"task": "title"}, REPLY, HI | {"task": "action"}, REPLY, HI]
    assert render(encoder, messages, thinking=False) == (
        f"<｜User｜>Hi<｜title｜>x{EOS}<｜User｜>Hi<｜Assistant｜></think><｜action｜>x{EOS}"
        "<｜User｜>Hi<｜Assistant｜></think>"
    )
    partial = encoder.encode(ChatInput([HI | {"task": "title"}, REPLY | {"prefix": True}]))
    assert partial.start is AnswerStart.PLAIN


@both_profiles
@pytest.mark.parametrize(
    ("messages", "task", "param"),
    [
        ([HI], "bogus", "task"),
        ([HI, REPLY], "title", "task"),
        ([HI | {"task": "bogus"}], None, "messages[0].task"),
    ],
    ids=["unknown", "assistant", "in-message"],
)
def test_c15_wrong_tasks_are_refused(
    encoder: ChatEncoder, messages: Any, task: Any, param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        encoder.encode(ChatInput(messages, task=task))
    assert caught.value.param == param


@both_profiles
@pytest.mark.parametrize(
    ("thinking", "is_max", "limit"),
    [(False, False, 8192), (True, False, 65536), (True, True, 131072)],
)
def test_c27_default_limits(encoder: ChatEncoder, thinking: bool, is_max: bool, limit: int) -> None:
    effort = "max" if is_max else None
    prompt = encoder.encode(ChatInput([HI], thinking=thinking, reasoning_effort=effort))
    assert prompt.default_max_tokens(2**20) == limit
    assert prompt.default_max_tokens(len(prompt.token_ids) + 5) == 5


def test_threads_share_an_encoder(encoder: ChatEncoder) -> None:
    chats = [ChatInput([HI, REPLY] * n + [HI], tools=(TOOL,)) for n in range(40)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encoder.encode, chats)) == [encoder.encode(chat) for chat in chats]


@pytest.mark.parametrize("profile", [V4, V41], ids=lambda profile: profile.name)
def test_c51_half_a_surrogate_pair_is_a_replacement_character(
    tokenizer: Tokenizer, profile: Profile
) -> None:
    def prompt(half: str) -> str:
        messages = [
            {"role": "system", "content": half},
            {"role": "user", "content": f"a{half}b"},
            calls(half, arguments=f'{{"{half}": "{half}"}}', content=half, reasoning=half),
            result(half, half),
        ]
        return render(ChatEncoder(tokenizer, profile), messages, tools=(Tool("f", half),))

    assert prompt("\udc12") == prompt("\ufffd")
