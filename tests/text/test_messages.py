"""Messages in every shape that clients send."""

from __future__ import annotations

from typing import Any

import pytest

from leadline.core.errors import BadRequest
from leadline.text.chat import ChatInput
from leadline.text.encoding import ChatEncoder
from tests.text.prompts import HI, REPLY, TOOL, both_profiles, calls, render, result, system

LINE = "x-anthropic-billing-header: cc_version=2; cch={};"


@both_profiles
@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([HI, "text"], "messages[1]"),
        ([HI, {"role": "narrator", "content": "x"}], "messages[1].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": ["a", 5]}], "messages[0].content[1].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([HI, REPLY | {"reasoning_content": 1}], "messages[1].reasoning_content"),
        (
            [HI, {"role": "assistant", "tool_calls": 3}],
            "messages[1].tool_calls",
        ),
        ([HI, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0].function"),
        ([HI, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        ([HI | {"task": ["title"]}], "messages[0].task"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_c5_errors_name_the_place(encoder: ChatEncoder, messages: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        encoder.encode(ChatInput(messages))
    assert caught.value.param == param
    assert param.partition(".")[0] in str(caught.value)


@both_profiles
@pytest.mark.parametrize("kind", ["image_url", "image", "input_image"])
def test_c5_images_are_refused_by_name(encoder: ChatEncoder, kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:,"}}
    with pytest.raises(BadRequest, match=f"{kind}.*images are not supported") as caught:
        encoder.encode(ChatInput([HI, {"role": "user", "content": ["text", part]}]))
    assert caught.value.param == "messages[1].content[1].type"
    assert caught.value.code == "not_supported"


@both_profiles
def test_c17_r11_a_quoted_image_marker_does_not_lock_a_conversation(encoder: ChatEncoder) -> None:
    marker = "<｜deepseek_image｜>"
    messages = [{"role": "user", "content": f"what is {marker}?"}, REPLY]
    messages += [HI, calls("1"), result("1", [{"type": "text", "text": marker}]), HI]
    token_ids = encoder.encode(ChatInput(messages)).token_ids
    assert encoder.tokenizer.decode(token_ids).count(marker) == 2
    assert encoder.tokenizer.marker_id(marker) not in token_ids


@both_profiles
@pytest.mark.parametrize(
    "content",
    [
        ["a", "b"],
        [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}],
        [{"type": "output_text", "text": "a"}, "b"],
    ],
    ids=["strings", "parts", "mixed"],
)
@pytest.mark.parametrize(
    "message", [HI, system(""), {"role": "assistant"}, result("1", "")], ids=lambda m: m["role"]
)
def test_item_81_parts_are_joined_by_a_blank_line(
    encoder: ChatEncoder, message: Any, content: Any
) -> None:
    parts, text = (
        encoder.encode(ChatInput([HI, calls("1"), message | {"content": form}]))
        for form in (content, "a\n\nb")
    )
    assert parts == text


@both_profiles
@pytest.mark.parametrize(
    "message",
    [HI, system(""), {"role": "assistant"}, result("1", ""), {"role": "latest_reminder"}],
    ids=lambda m: m["role"],
)
def test_item_81_null_content_is_empty(encoder: ChatEncoder, message: Any) -> None:
    null, empty, missing = (
        encoder.encode(ChatInput([HI, calls("1"), form, HI]))
        for form in (
            message | {"content": None},
            message | {"content": ""},
            {key: value for key, value in message.items() if key != "content"},
        )
    )
    assert null == empty == missing


@both_profiles
def test_item_82_reasoning_has_two_names(encoder: ChatEncoder) -> None:
    rendered = {
        render(encoder, [HI, calls("1", **fields), result("1", "R")], tools=(TOOL,))
        for fields in (
            {"reasoning_content": "why"},
            {"reasoning": "why"},
            {"reasoning_content": "why", "reasoning": "other"},
            {"reasoning_content": None, "reasoning": "why"},
        )
    }
    assert len(rendered) == 1
    assert "<think>why</think>" in rendered.pop()


def test_names_and_unknown_keys_are_ignored(encoder: ChatEncoder) -> None:
    named = HI | {"name": "Ada", "cache_control": {"type": "ephemeral"}}
    assert encoder.encode(ChatInput([named])) == encoder.encode(ChatInput([HI]))


def test_developer_is_system(encoder: ChatEncoder, v4_encoder: ChatEncoder) -> None:
    for each in (encoder, v4_encoder):
        by_role = {
            each.encode(ChatInput([{"role": role, "content": "S"}, HI])).token_ids
            for role in ("system", "developer")
        }
        assert len(by_role) == 1


@both_profiles
@pytest.mark.parametrize(
    "contents",
    [
        lambda line: [system(f"{line}\nYou are helpful.")],
        lambda line: [system(f"{line}\n\nYou are helpful.")],
        lambda line: [system([{"type": "text", "text": line}, "You are helpful."])],
        lambda line: [system(line), system("You are helpful.")],
    ],
    ids=["line", "paragraph", "block", "message"],
)
def test_r8_c34_billing_line_is_removed(encoder: ChatEncoder, contents: Any) -> None:
    want = encoder.encode(ChatInput([system("You are helpful."), HI]))
    for nonce in range(2):
        messages = [*contents(LINE.format(nonce)), HI]
        assert encoder.encode(ChatInput(messages)) == want


@both_profiles
def test_r8_nothing_but_the_billing_line_is_no_system_message(encoder: ChatEncoder) -> None:
    assert encoder.encode(ChatInput([system(LINE), HI])) == encoder.encode(ChatInput([HI]))
    with pytest.raises(BadRequest, match="messages is empty"):
        encoder.encode(ChatInput([system(LINE)]))


def test_billing_line_of_a_user_is_text(encoder: ChatEncoder) -> None:
    assert LINE in render(encoder, [{"role": "user", "content": LINE}])


def test_legacy_function_calls(encoder: ChatEncoder) -> None:
    old = [
        HI,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "R"},
    ]
    new = [HI, calls("1"), result("1", "R")]
    assert encoder.encode(ChatInput(old)) == encoder.encode(ChatInput(new))
