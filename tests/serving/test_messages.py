"""The Messages dialect: what it asks of the model, and how its blocks come."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.conftest import HELLO, MakeRig, Rig, both_profiles
from tests.serving.test_chat import CALL

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search"}
NO_ARGUMENTS = (
    'ok</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def ask(server: Rig, **body: Any) -> Any:
    return server.post(PATH, **({"messages": HELLO, "max_tokens": 2000} | body))


def events(server: Rig, **body: Any) -> list[Any]:
    return server.events(PATH, **({"messages": HELLO, "max_tokens": 2000} | body))


def accumulated(stream: list[Any]) -> list[Any]:
    """Content blocks put together from a stream, which is checked for its order (C38)."""
    blocks: list[Any] = []
    is_open = False
    for event in stream:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                delta = dict(event["delta"])
                assert delta.pop("type").endswith("_delta")
                ((key, text),) = delta.items()
                blocks[-1][key] = blocks[-1].get(key, "") + text
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(blocks) - 1
                is_open = False
    assert not is_open
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("partial_json"))
    return blocks


def test_answer_has_thinking_and_text_blocks(rig: MakeRig) -> None:
    reply = ask(rig("Hm.</think>Hello!"))
    thinking, text = reply["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": reply["id"]}
    assert text == {"type": "text", "text": "Hello!"}
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("end_turn", None)
    assert reply["id"].startswith("msg_")
    assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", "tiny")


@both_profiles
@pytest.mark.parametrize("step", [1, 2, 7, 1000], ids=lambda n: f"step={n}")
@pytest.mark.parametrize("text", ["Hm.</think>Hello 😀", CALL, NO_ARGUMENTS, "</think>"])
def test_c38_stream_has_consecutive_blocks_and_equals_the_whole(
    rig: MakeRig, text: str, step: int
) -> None:
    ids = [*rig("").tokenizer.encode(text), 1]
    steps = [ids[i : i + step] for i in range(0, len(ids), step)]
    stream = events(rig(steps), tools=[WEATHER])
    whole = ask(rig([ids]), tools=[WEATHER])
    types = [event["type"] for event in stream]
    assert types[:2] == ["message_start", "ping"]
    assert types[-2:] == ["message_delta", "message_stop"]
    blocks = accumulated(stream)
    for block in (*blocks, *whole["content"]):
        block.pop("id", None)  # of the call
        block.pop("signature", None)
    assert blocks == whole["content"]
    assert all(block.get("text") != "" for block in blocks)
    assert stream[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert stream[-2]["usage"] == whole["usage"]


@both_profiles
def test_c38_a_tool_without_parameters_sends_an_empty_object(rig: MakeRig) -> None:
    stream = events(rig(NO_ARGUMENTS), tools=[WEATHER])
    fragments = [e["delta"]["partial_json"] for e in stream if "partial_json" in str(e)]
    assert fragments == ["{}"]
    assert ask(rig(NO_ARGUMENTS), tools=[WEATHER])["content"][-1]["input"] == {}


def test_tool_use(rig: MakeRig) -> None:
    reply = ask(rig(CALL), tools=[WEATHER])
    assert [block["type"] for block in reply["content"]] == ["thinking", "text", "tool_use"]
    assert reply["content"][-1]["input"] == {"city": "Oslo 2>&1", "days": 3}
    assert reply["stop_reason"] == "tool_use"


def test_signature_comes_just_before_the_thinking_block_stops(rig: MakeRig) -> None:
    stream = events(rig("Hm</think>Hi"))
    at = next(i for i, e in enumerate(stream) if "signature_delta" in str(e))
    assert stream[at]["delta"]["signature"]
    assert stream[at + 1] == {"type": "content_block_stop", "index": 0}


@both_profiles
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_c35_disabled_thinking_sends_no_thinking_block(rig: MakeRig, stream: bool) -> None:
    server = rig("<think>Hm</think>Hello")
    off = {"thinking": {"type": "disabled"}}
    blocks = accumulated(events(server, **off)) if stream else ask(server, **off)["content"]
    assert [block["type"] for block in blocks] == ["text"]
    assert server.prompt.endswith("<｜Assistant｜></think>")


@pytest.mark.parametrize("kind", ["adaptive", None])
def test_thinking_is_on(rig: MakeRig, kind: str | None) -> None:
    server = rig("Hm</think>Hello")
    ask(server, thinking=kind and {"type": kind})
    assert server.prompt.endswith("<｜Assistant｜><think>")


def test_thinking_budget_reaches_the_engine(rig: MakeRig) -> None:
    server = rig("x")
    ask(server, thinking={"type": "enabled", "budget_tokens": 1024})
    budget = server.engine.requests[0].thinking_budget
    assert budget is not None
    assert budget.num_tokens == 1024


@pytest.mark.parametrize("budget", [None, 1023, 2000], ids=str)
def test_a_budget_outside_its_domain_is_refused(rig: MakeRig, budget: int | None) -> None:
    thinking = {"type": "enabled", "budget_tokens": budget}
    error = rig("x").refuse(PATH, messages=HELLO, max_tokens=2000, thinking=thinking)
    assert error["type"] == "invalid_request_error"
    assert "budget_tokens" in error["message"]


@both_profiles
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_c36_input_tokens_sum_to_the_prompt(rig: MakeRig, stream: bool) -> None:
    server = rig("Hm</think>Hello")
    server.engine.num_cached_tokens = 3
    usage = events(server)[0]["message"]["usage"] if stream else ask(server)["usage"]
    assert usage["cache_read_input_tokens"] == 3
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    num_prompt = len(server.engine.requests[0].prompt_token_ids)
    assert sum(usage[name] for name in names) == num_prompt


@both_profiles
def test_c37_count_tokens_is_the_length_of_the_prompt(rig: MakeRig) -> None:
    server = rig("x")
    body = {"messages": HELLO, "tools": [WEATHER], "system": "Be brief.", "thinking": None}
    count = server.post(COUNT, **body)
    ask(server, **body)
    assert count == {"input_tokens": len(server.engine.requests[0].prompt_token_ids)}


@both_profiles
def test_c34_the_billing_line_is_not_part_of_the_prompt(rig: MakeRig) -> None:
    server = rig("x")
    for nonce in ("a1", "b2"):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={nonce};"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ]
        ask(server, system=system)
    first, second = (request.prompt_token_ids for request in server.engine.requests)
    assert first == second
    assert "You are an agent.\n\nBe brief.<｜User｜>" in server.prompt
    assert "billing" not in server.prompt


def test_history_of_blocks_is_rendered_as_a_chat(rig: MakeRig) -> None:
    server = rig("x")
    call = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Oslo"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": "3"}],
    }
    thought = {"type": "thinking", "thinking": "Look it up.", "signature": "s"}
    ask(
        server,
        tools=[WEATHER],
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [thought, {"type": "redacted_thinking"}, call]},
            {"role": "user", "content": [{"type": "text", "text": "And?"}, result]},
        ],
    )
    by_messages = server.prompt
    server.chat(
        tools=[
            {
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "description": "Get the weather",
                    "parameters": WEATHER["input_schema"],
                },
            }
        ],
        messages=[
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "reasoning_content": "Look it up.",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "user", "content": "And?"},
        ],
    )
    assert by_messages == server.prompt
    assert "<tool_result>3</tool_result>\n\nAnd?<｜Assistant｜><think>" in by_messages


def test_a_trailing_assistant_message_is_continued(rig: MakeRig) -> None:
    server = rig(" two")
    reply = ask(
        server,
        messages=[*HELLO, {"role": "assistant", "content": "One"}],
        thinking={"type": "disabled"},
    )
    assert server.prompt.endswith("<｜Assistant｜></think>One")
    assert reply["content"] == [{"type": "text", "text": " two"}]


def test_text_of_documents_results_and_references_is_rendered(rig: MakeRig) -> None:
    server = rig("x")
    texts = [{"type": "text", "text": "found"}]
    ask(
        server,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "document", "title": "T", "source": {"type": "text", "data": "D"}},
                    {"type": "search_result", "title": "S", "source": "u", "content": texts},
                    {"type": "web_search_tool_result", "content": []},
                    {"type": "tool_reference", "tool_name": "zip"},
                ],
            }
        ],
    )
    assert "<｜User｜>T\n\nD\n\nS\nu\n\nfound\n\nzip<｜Assistant｜>" in server.prompt


@pytest.mark.parametrize(
    ("block", "path"),
    [
        ({"type": "image", "source": {"type": "url", "url": "u"}}, "type"),
        ({"type": "document", "source": {"type": "base64", "data": ""}}, "source.type"),
        ({"type": "hologram"}, "type"),
        ({"type": "text", "text": 3}, "text"),
    ],
    ids=["image", "pdf", "unknown", "number"],
)
def test_content_that_cannot_be_read_is_refused(
    rig: MakeRig, block: dict[str, Any], path: str
) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, block]}]
    error = rig("x").refuse(PATH, messages=messages, max_tokens=5)
    assert f"messages[0].content[1].{path}" in error["message"]


@pytest.mark.parametrize(
    ("choice", "mode", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "tool", "name": "get_weather"}, "named", False),
        ({"type": "none"}, "none", True),
    ],
    ids=["auto", "one", "any", "tool", "none"],
)
def test_tool_choice(rig: MakeRig, choice: dict[str, Any], mode: str, parallel: bool) -> None:
    server = rig("Hm</think>Hello")
    ask(server, tools=[WEATHER], tool_choice=choice)
    assert ("get_weather" in server.prompt) == (mode != "none")
    constraint = server.engine.requests[0].constraint
    assert (constraint is None) == (mode == "none")


def test_hosted_tools_are_dropped(rig: MakeRig) -> None:
    server = rig("x")
    bash = {"type": "bash_20250124", "name": "bash", "input_schema": {"type": "object"}}
    ask(server, tools=[WEB_SEARCH, {"type": "mcp_toolset", "mcp_server_name": "files"}, bash])
    assert '"bash"' in server.prompt
    assert "web_search" not in server.prompt
    assert "mcp" not in server.prompt


def test_a_function_needs_a_name(rig: MakeRig) -> None:
    error = rig("x").refuse(PATH, messages=HELLO, max_tokens=9, tools=[{"input_schema": {}}])
    assert error["message"].startswith("tools[0].name")


@pytest.mark.parametrize(
    ("choice", "tools", "is_constrained"),
    [
        ({"type": "tool", "name": "web_search"}, [WEB_SEARCH], False),
        ({"type": "any"}, [WEB_SEARCH], False),
        ({"type": "tool", "name": "web_search"}, [WEB_SEARCH, WEATHER], True),
    ],
    ids=["named", "any", "named_beside_a_function"],
)
def test_c64_a_hosted_tool_that_was_dropped_is_not_demanded(
    rig: MakeRig, choice: dict[str, Any], tools: list[Any], is_constrained: bool
) -> None:
    server = rig("Hm.</think>Hello")
    reply = ask(server, tools=tools, tool_choice=choice)
    assert reply["stop_reason"] == "end_turn"
    assert (server.engine.requests[0].constraint is not None) == is_constrained


@pytest.mark.parametrize(
    "kind",
    ["tool_search_tool_result", "bash_code_execution_tool_result", "web_search_tool_result"],
)
def test_results_of_hosted_tools_are_skipped(rig: MakeRig, kind: str) -> None:
    server = rig("x")
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "search", "input": {}},
        {"type": kind, "tool_use_id": "s", "content": {}},
        {"type": "text", "text": "Found."},
    ]
    ask(server, messages=[*HELLO, {"role": "assistant", "content": blocks}, *HELLO])
    assert "</think>Found.<" in server.prompt


def test_stop_sequence_is_named(rig: MakeRig) -> None:
    reply = ask(rig("</think>one STOP two"), stop_sequences=["STOP"])
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "STOP")
    assert reply["content"] == [{"type": "text", "text": "one "}]


def test_a_call_cut_by_length_reports_max_tokens(rig: MakeRig) -> None:
    reply = ask(rig(CALL.partition(" 2>&1")[0], end=False), tools=[WEATHER])
    assert reply["stop_reason"] == "max_tokens"
    assert reply["content"][-1]["type"] == "tool_use"


def test_limits_are_lowered_and_never_refused(rig: MakeRig) -> None:
    server = rig("x", strict_max_tokens=True)
    ask(server, max_tokens=10**6)
    request = server.engine.requests[0]
    assert request.sampling.max_tokens == 8192 - len(request.prompt_token_ids)
    assert server.refuse(PATH, messages=HELLO)["message"].startswith("max_tokens")


def test_agents_find_the_words_they_look_for(rig: MakeRig) -> None:
    messages = [{"role": "user", "content": " the" * 9000}]
    error = rig("x").refuse(PATH, messages=messages, max_tokens=5)
    assert error["type"] == "invalid_request_error"
    assert "prompt is too long: " in error["message"]
    assert " tokens > 8191 maximum" in error["message"]


def test_fields_of_agents_are_accepted(rig: MakeRig) -> None:
    server = rig("x")
    ask(
        server,
        metadata={"user_id": '{"session": "' + "x" * 900 + '"}'},
        service_tier="auto",
        container=None,
        context_management={"edits": []},
        mcp_servers=[],
        betas=["a"],
        model="tiny[1m]",
        output_config={"effort": "low"},
    )
    assert server.engine.requests[0].session_key
    assert "Reasoning Effort: 50" in server.prompt


def test_output_format_constrains_the_answer(rig: MakeRig) -> None:
    server = rig('Hm</think>{"a": 1}')
    form = {"type": "json_schema", "schema": {"type": "object"}}
    ask(server, output_config={"format": form})
    assert server.engine.requests[0].constraint is not None
    assert "## Response Format:" in server.prompt


@pytest.mark.parametrize(
    "path", [PATH, "/anthropic/v1/messages", PATH + "?beta=true"], ids=["v1", "anthropic", "query"]
)
def test_paths(rig: MakeRig, path: str) -> None:
    body = {"messages": HELLO, "max_tokens": 9}
    assert rig("</think>Hi").post(path, **body)["type"] == "message"
    count = rig("x").post(path.replace("/messages", "/messages/count_tokens"), messages=HELLO)
    assert count["input_tokens"] > 0


def test_an_error_in_mid_stream_is_an_event(rig: MakeRig) -> None:
    stream = events(rig([(66,), RuntimeError("secret")], end=False))
    assert stream[-1]["type"] == "error"
    assert stream[-1]["error"]["type"] == "api_error"
    assert "secret" not in str(stream[-1])
