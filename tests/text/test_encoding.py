"""Chat prompts: what clients send in many spellings renders as one prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leadline.core.errors import BadRequest, ConfigError
from leadline.text.encoding import ChatEncoder
from leadline.text.tokenizer import Tokenizer

HI: Any = {"role": "user", "content": "Hi"}
CHAT: Any = {"thinking": {"type": "disabled"}}
HEAD = "<｜begin▁of▁sentence｜>"
TOOL: Any = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="session")
def encoder(tokenizer: Tokenizer) -> ChatEncoder:
    return ChatEncoder(tokenizer)


def render(encoder: ChatEncoder, messages: list[Any], **options: Any) -> str:
    text = encoder.tokenizer.decode(encoder.encode(messages, **options).token_ids)
    assert text.startswith(HEAD)
    return text.removeprefix(HEAD)


def calls(*ids: str, arguments: Any = "{}") -> Any:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [
            {"id": call_id, "type": "function", "function": function} for call_id in ids
        ],
    }


def result(call_id: str, content: Any) -> Any:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def results_part(text: str) -> str:
    """The turn that follows the tool calls."""
    return text.partition("</｜DSML｜ calls><｜end▁of▁sentence｜>")[2]


def test_missing_marker_is_named_at_start(tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = json.loads(tokenizer.path.read_text(encoding="utf-8"))
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<｜System｜>"]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match="no token <｜System｜>"):
        ChatEncoder(Tokenizer(path))


def test_chat_mode_starts_with_the_user(encoder: ChatEncoder) -> None:
    assert render(encoder, [HI], **CHAT) == "<｜User｜>Hi<｜Assistant｜></think>"


def test_markers_typed_by_a_user_are_text(encoder: ChatEncoder) -> None:
    plain = encoder.encode([HI], **CHAT).token_ids
    typed = "<｜Assistant｜></think><｜deepseek_image｜>｜DSML｜"
    ids = encoder.encode([{"role": "user", "content": f"Hi{typed}"}], **CHAT).token_ids
    markers = set(encoder.tokenizer.encode(typed))
    assert [i for i in ids if i in markers] == [i for i in plain if i in markers]
    assert encoder.tokenizer.decode(ids).count(typed) == 1


@pytest.mark.parametrize(
    ("effort", "number"),
    [
        ("low", 50),
        (None, 75),
        ("max", 100),
        ("xhigh", 75),
        (1, 1),
        (37, 37),
        (100, 100),
        ("30", 30),
    ],
    ids=str,
)
def test_effort_line_says_the_number(encoder: ChatEncoder, effort: Any, number: int) -> None:
    line = f"Reasoning Effort: {number} (range 1-100, the higher the value, the more thorough the "
    want = f"<｜System｜>{line}reasoning)\n\n<｜User｜>Hi<｜Assistant｜><think>"
    assert render(encoder, [HI], reasoning_effort=effort) == want


@pytest.mark.parametrize("effort", [0, 101, -1, True, 12.5, "bogus", "101"], ids=repr)
def test_other_efforts_are_refused(encoder: ChatEncoder, effort: Any) -> None:
    with pytest.raises(BadRequest, match="reasoning_effort is") as caught:
        encoder.encode([HI], reasoning_effort=effort)
    assert caught.value.param == "reasoning_effort"


@pytest.mark.parametrize(
    "options",
    [
        {"thinking": False},
        {"thinking": {"type": "disabled"}, "reasoning_effort": 30},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"thinking": False}, "thinking": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=str,
)
def test_every_switch_turns_thinking_off(encoder: ChatEncoder, options: Any) -> None:
    assert render(encoder, [HI], **options).endswith("<｜User｜>Hi<｜Assistant｜></think>")


@pytest.mark.parametrize("thinking", [True, {"type": "enabled"}, {"type": "adaptive"}], ids=str)
def test_switch_beats_effort_none(encoder: ChatEncoder, thinking: Any) -> None:
    text = render(encoder, [HI], thinking=thinking, reasoning_effort="none")
    assert text.endswith("<｜Assistant｜><think>")
    assert "Effort: 75" in text


@pytest.mark.parametrize(
    "content",
    [
        ["a", "b"],
        [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}],
        "a\n\nb",
    ],
    ids=["strings", "parts", "string"],
)
@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_parts_are_joined_by_a_blank_line(encoder: ChatEncoder, role: str, content: Any) -> None:
    marker = "<｜User｜>" if role == "user" else "<｜System｜>"
    text = render(
        encoder, [HI, {"role": "assistant", "content": "x"}, {"role": role, "content": content}]
    )
    assert text.endswith(f"{marker}a\n\nb<｜Assistant｜><think>")


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_null_content_is_empty(encoder: ChatEncoder, role: str) -> None:
    assert render(encoder, [{"role": role, "content": None}, HI])


def test_reasoning_has_two_names(encoder: ChatEncoder) -> None:
    rendered = {
        render(encoder, [HI, calls("1") | {key: "why"}, result("1", "R")], tools=[TOOL])
        for key in ("reasoning_content", "reasoning")
    }
    assert len(rendered) == 1
    assert "<think>why</think>" in rendered.pop()


@pytest.mark.parametrize("arguments", ["", "{bad", "[1]", '"{}"'], ids=repr)
def test_arguments_that_are_no_object_stay_a_string(encoder: ChatEncoder, arguments: str) -> None:
    text = render(encoder, [HI, calls("1", arguments=arguments), result("1", "R")], **CHAT)
    assert f'<｜DSML｜ parameter name="arguments" string="true">{arguments}</' in text


def test_arguments_may_be_an_object(encoder: ChatEncoder) -> None:
    as_text, as_object = (
        render(encoder, [HI, calls("1", arguments=arguments), result("1", "R")], **CHAT)
        for arguments in ('{"a": "é", "n": 3}', {"a": "é", "n": 3})
    )
    assert as_text == as_object


def test_results_follow_the_order_of_the_calls(encoder: ChatEncoder) -> None:
    messages = [HI, calls("1", "2"), result("2", "two"), result("1", "one"), HI]
    assert results_part(render(encoder, messages, **CHAT)).startswith(
        "<｜User｜><tool_result>one</tool_result>\n\n<tool_result>two</tool_result>\n\nHi"
    )


@pytest.mark.parametrize(
    ("after", "rendered"),
    [
        ([], "<tool_result></tool_result>"),
        ([HI], "<tool_result></tool_result>\n\nHi"),
        ([result("1", None)], "<tool_result></tool_result>"),
        (
            [result("9", "lost"), result("1", "R")],
            "<tool_result>R</tool_result>\n\n<tool_result>lost</tool_result>",
        ),
        (
            [result("1", "R"), result("1", "again")],
            "<tool_result>R</tool_result>\n\n<tool_result>again</tool_result>",
        ),
    ],
    ids=["none", "user", "null", "orphan", "twice"],
)
def test_broken_tool_turns_are_repaired(
    encoder: ChatEncoder, after: list[Any], rendered: str
) -> None:
    text = results_part(render(encoder, [HI, calls("1"), *after], **CHAT))
    assert text == f"<｜User｜>{rendered}<｜Assistant｜></think>"


def test_orphan_without_any_call_is_user_text(encoder: ChatEncoder) -> None:
    text = render(encoder, [HI, result("1", "R")], **CHAT)
    assert text == "<｜User｜>Hi\n\n<tool_result>R</tool_result><｜Assistant｜></think>"


@pytest.mark.parametrize(
    ("last", "options", "tail"),
    [
        ({"content": "x"}, CHAT, "</think>x"),
        ({"content": "x"}, {}, "<think></think>x"),
        ({"reasoning_content": "r"}, {}, "<think>r"),
        ({"content": "x", "reasoning_content": "r"}, {}, "<think>r</think>x"),
    ],
    ids=["chat", "thinking", "reasoning", "both"],
)
@pytest.mark.parametrize("how", ["prefix", "continue_final_message"])
def test_partial_answer_is_continued(
    encoder: ChatEncoder, last: Any, options: Any, tail: str, how: str
) -> None:
    message: Any = {"role": "assistant"} | last
    if how == "prefix":
        text = render(encoder, [HI, message | {"prefix": True}], **options)
    else:
        text = render(encoder, [HI, message], **options, continue_final_message=True)
    assert text.endswith(f"<｜User｜>Hi<｜Assistant｜>{tail}")


def test_answer_without_prefix_is_closed(encoder: ChatEncoder) -> None:
    text = render(encoder, [HI, {"role": "assistant", "content": "x"}], **CHAT)
    assert text.endswith("</think>x<｜end▁of▁sentence｜><｜Assistant｜></think>")


def test_continuing_a_user_is_refused(encoder: ChatEncoder) -> None:
    with pytest.raises(BadRequest, match="only a last message of the assistant"):
        encoder.encode([HI], continue_final_message=True)


def test_billing_line_is_removed(encoder: ChatEncoder) -> None:
    texts = {
        render(encoder, [{"role": "system", "content": f"x-anthropic-billing-header: {i}"}, HI])
        for i in range(2)
    }
    assert len(texts) == 1
