"""Faults that users of other servers reported (R1 to R15), reproduced over HTTP.

What needs more than a chat has its test elsewhere: R5 and R9 in ``test_chat_fields.py``, R7 in
``tests/test_user_reports.py``, R12 in ``test_admission.py``, R14 in ``test_sse.py``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from leadline.serving.affinity import place, prefix_key
from tests.serving.conftest import HELLO, MakeRig, Rig, both_profiles
from tests.serving.test_chat import TOOLS
from tests.serving.test_messages import COUNT

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SPAWN: dict[str, Any] = {
    "type": "object",
    "properties": {
        "background": {"type": "boolean"},
        "count": {"type": "integer"},
        "files": {"type": "array"},
        "env": {"type": "object"},
        "limit": {"type": ["integer", "null"]},
    },
}
SPAWNED = {"background": True, "count": 3, "files": ["a"], "env": {"A": 1}, "limit": None}


def call_of(name: str, *parameters: tuple[str, str, bool]) -> str:
    """An answer that calls a tool with (name, text, is_string)."""
    lines = [
        f'<｜DSML｜ parameter name="{key}" string="{str(is_string).lower()}">{text}'
        "</｜DSML｜ parameter>\n"
        for key, text, is_string in parameters
    ]
    head = f'hm</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="{name}">\n'
    return f"{head}{''.join(lines)}</｜DSML｜ invoke>\n</｜DSML｜ calls>"


def fragments_of(server: Rig, **body: Any) -> list[str]:
    """The pieces in which the arguments of a streamed chat's only call come."""
    deltas = [chunk["choices"][0]["delta"] for chunk in server.stream(tools=TOOLS, **body)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return [call["function"]["arguments"] for call in calls]


def prompt_of(server: Rig, **body: Any) -> str:
    tokens = server.post("/tokenize", **({"messages": HELLO} | body))["tokens"]
    return server.tokenizer.decode(tokens)


@both_profiles
@pytest.mark.parametrize("value", ["echo hi 2>&1", "cat <", "cat </", "a</b>"])
def test_r1_a_streamed_command_ends_where_its_value_ends(rig: MakeRig, value: str) -> None:
    server = rig(call_of("get_weather", ("city", value, True)))
    ids = [step[0] for step in server.engine.script if not isinstance(step, BaseException)]
    for border in range(len(ids) - 20, len(ids)):
        server.engine.script = [ids[:border], *((i,) for i in ids[border:])]
        fragments = fragments_of(server)
        assert json.loads("".join(fragments)) == {"city": value}
        assert not any("DSML" in piece for piece in fragments)


@pytest.mark.parametrize(
    ("effort", "number"), [("low", 50), ("high", 75), (None, 75), ("max", 100), (37, 37)], ids=str
)
def test_r2_efforts_are_those_of_the_release(rig: MakeRig, effort: Any, number: int) -> None:
    prompt = prompt_of(rig(""), reasoning_effort=effort)
    assert f"Reasoning Effort: {number} (range 1-100" in prompt


@pytest.mark.parametrize(
    ("config", "tail"),
    [
        ({}, "x<｜end▁of▁sentence｜><｜System｜>French<｜User｜>Hi"),
        ({"effort_profile": "v4"}, "x<｜end▁of▁sentence｜><｜User｜>Hi"),
        (
            {"effort_profile": "v4", "v4_inline_system": "reminder"},
            "x<｜end▁of▁sentence｜><｜latest_reminder｜>French<｜User｜>Hi",
        ),
    ],
    ids=["v41", "v4", "v4-reminder"],
)
def test_r3_late_system_text_never_becomes_user_text(
    rig: MakeRig, config: dict[str, Any], tail: str
) -> None:
    system = [{"role": "system", "content": text} for text in ("Be brief.", "French")]
    answer = {"role": "assistant", "content": "x"}
    messages = [system[0], *HELLO, answer, system[1], *HELLO]
    prompt = prompt_of(rig("", **config), messages=messages, thinking=False)
    assert f"{tail}<｜Assistant｜>" in prompt
    assert prompt.count("French") == 1
    assert ("Be brief.\n\nFrench<｜User｜>" in prompt) == (config == {"effort_profile": "v4"})


@both_profiles
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_r4_a_json_answer_is_content_and_its_reasoning_is_free(rig: MakeRig, stream: bool) -> None:
    server = rig('I would say {this}.</think>{"n": 1}')
    form: dict[str, Any] = {"response_format": {"type": "json_object"}}
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in server.stream(**form)]
        content = "".join(delta.get("content") or "" for delta in deltas)
    else:
        content = server.chat(**form)["choices"][0]["message"]["content"]
    assert json.loads(content) == {"n": 1}
    constraint = server.engine.requests[0].constraint
    assert constraint is not None
    assert constraint.at_once is None
    assert [server.tokenizer.decode([start]) for start, _ in constraint.after] == ["</think>"]


@both_profiles
@pytest.mark.parametrize("is_string", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_r6_booleans_are_no_strings(rig: MakeRig, path: str, is_string: bool) -> None:
    parameters = [(key, json.dumps(value), is_string) for key, value in SPAWNED.items()]
    server = rig(call_of("spawn", *parameters))
    if path == MESSAGES:
        body = {"tools": [{"name": "spawn", "input_schema": SPAWN}], "max_tokens": 2000}
        assert server.post(path, messages=HELLO, **body)["content"][-1]["input"] == SPAWNED
        events = server.events(path, messages=HELLO, **body)
        parts = [event["delta"].get("partial_json", "") for event in events if "delta" in event]
        assert json.loads("".join(parts)) == SPAWNED
        return
    tools = [{"type": "function", "function": {"name": "spawn", "parameters": SPAWN}}]
    [call] = server.chat(tools=tools)["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == SPAWNED
    streamed = "".join(
        part["function"]["arguments"]
        for chunk in server.stream(tools=tools)
        for part in chunk["choices"][0]["delta"].get("tool_calls", ())
    )
    assert json.loads(streamed) == SPAWNED


@both_profiles
def test_r8_a_changing_billing_line_changes_nothing(rig: MakeRig) -> None:
    server = rig("x")
    counts = set()
    for nonce in ("a1", "b2"):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: v=2; cch={nonce};"}
        body = {"messages": HELLO, "system": [billing, {"type": "text", "text": "An agent."}]}
        server.post(MESSAGES, **body, max_tokens=9)
        counts.add(server.post(COUNT, **body)["input_tokens"])
    [ids] = {request.prompt_token_ids for request in server.engine.requests}
    assert counts == {len(ids)}


def test_r10_turns_of_a_conversation_meet_on_one_idle_rank() -> None:
    idle = [0, 0, 0, 0]
    for session in range(20):
        history = list(range(session, session + 300))
        ranks = set()
        for turn in range(10):
            history += [turn] * 50
            ranks.add(place(f"session-{session}", idle))
        assert len(ranks) == 1
        without_key = {place(prefix_key(history[:end], 256), idle) for end in range(300, 800, 50)}
        assert len(without_key) == 1


@both_profiles
def test_r11_a_quoted_image_marker_locks_no_conversation(rig: MakeRig) -> None:
    marker = "<｜deepseek_image｜>"
    server = rig("x")
    quote = {"role": "user", "content": f"What does {marker} mean?"}
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    answered = {"role": "assistant", "content": "An image.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": marker}
    for messages in ([quote], [quote, answered, result], [quote, answered, result, *HELLO]):
        server.chat(messages=messages, tools=TOOLS)
        ids = server.engine.requests[-1].prompt_token_ids
        assert server.tokenizer.marker_id(marker) not in ids
        assert server.tokenizer.decode(ids).count(marker) == len(messages) // 3 + 1


@both_profiles
def test_r15_a_long_argument_comes_token_by_token(rig: MakeRig) -> None:
    server = rig(call_of("get_weather", ("city", "word and\n" * 500, True)))
    fragments = fragments_of(server, max_tokens=8000)
    assert json.loads("".join(fragments)) == {"city": "word and\n" * 500}
    assert len(fragments) > 1000
    _, first, *others = fragments
    assert len(first) < 0.02 * 500 * len("word and\n")  # short strings wait for their end
    assert max(map(len, others)) < 20
