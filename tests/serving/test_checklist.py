"""Statements of the checklist that hold in every dialect, over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic

from leadline.text.encoding import ChatEncoder
from leadline.text.tokenizer import Tokenizer
from tests.serving.conftest import HELLO, MakeRig, Rig, both_profiles
from tests.serving.test_chat import TOOLS
from tests.text.test_check_values import WANT, digest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": HELLO, "max_tokens": 2000},
}
every_dialect = pytest.mark.parametrize("path", BODIES)
every_chat = pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])

PART = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "smell"}]}]

# Fields that are numbers, with a value outside the domain of each (9.1, 5.1).
NUMBERS: dict[str, dict[str, Any]] = {
    CHAT: {
        "temperature": 2.1,
        "top_p": 0,
        "top_k": -2,
        "min_p": 1.1,
        "presence_penalty": 2.1,
        "frequency_penalty": -2.1,
        "repetition_penalty": 0,
        "seed": 2**63,
        "n": 129,
        "max_tokens": 0,
        "max_completion_tokens": 0,
        "min_tokens": -1,
        "top_logprobs": 21,
        "prompt_logprobs": 21,
        "thinking_token_budget": -2,
        "stream_interval": 0,
        "truncate_prompt_tokens": 0,
    },
    COMPLETIONS: {
        "temperature": -0.1,
        "top_p": 1.1,
        "top_k": -2,
        "min_p": -0.1,
        "presence_penalty": -2.1,
        "frequency_penalty": 2.1,
        "repetition_penalty": -1,
        "seed": -(2**63) - 1,
        "n": 0,
        "max_tokens": -1,
        "min_tokens": -1,
        "logprobs": 21,
        "prompt_logprobs": -2,
    },
    RESPONSES: {"temperature": 2.1, "top_p": 0, "max_output_tokens": 0, "top_logprobs": 21},
    MESSAGES: {"temperature": 2.1, "top_p": 0, "top_k": -2, "max_tokens": 0},
}


def post(server: Rig, path: str, **body: Any) -> Any:
    """The reply to a good body with these fields changed."""
    return server.http.post(path, json=BODIES[path] | body)


def param_of(reply: Any) -> str:
    """The field that a 400 names: OpenAI's ``param``, or Anthropic's message."""
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    named: str = error.get("param") or error["message"]
    return named


@both_profiles
@every_dialect
def test_c26_unknown_fields_are_ignored(rig: MakeRig, path: str) -> None:
    unknown: dict[str, Any] = {f"unknown_{i}": {"x": [i]} for i in range(20)}
    assert post(rig("a"), path, **unknown).status_code == 200


@pytest.mark.parametrize(
    "value", ["domain", True, "1", [1]], ids=["domain", "bool", "text", "list"]
)
@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in NUMBERS.items() for name in names]
)
def test_c39_what_is_no_number_of_the_domain_is_named(
    rig: MakeRig, path: str, name: str, value: Any
) -> None:
    server = rig("never said")
    value = NUMBERS[path][name] if value == "domain" else value
    extra = {"logprobs": True} if name == "top_logprobs" and path == CHAT else {}
    assert name in param_of(post(server, path, **extra, **{name: value}))
    assert not server.engine.requests


@every_dialect
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_c39_what_json_cannot_say_is_refused(rig: MakeRig, path: str, number: str) -> None:
    body = json.dumps(BODIES[path])[:-1] + f', "temperature": {number}}}'
    reply = rig("never said").http.post(path, content=body.encode())
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


@both_profiles
@every_dialect
def test_c44_a_mistake_in_a_streamed_request_is_a_plain_error(rig: MakeRig, path: str) -> None:
    reply = post(rig("never said"), path, stream=True, temperature=9)
    assert "temperature" in param_of(reply)
    assert reply.headers["content-type"] == "application/json"


@every_dialect
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_item_84_an_unknown_model_is_404(rig: MakeRig, path: str, stream: bool) -> None:
    reply = post(rig("never said"), path, stream=stream, model="other")
    assert reply.status_code == 404
    assert reply.json()["error"]["type"] == "not_found_error"
    assert post(rig("a"), path, model="tiny[1m]").status_code == 200


@both_profiles
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (RESPONSES, {"input": []}, "input"),
        (MESSAGES, {"messages": []}, "messages"),
        (CHAT, {"messages": [*HELLO, {"role": "owner", "content": "a"}]}, "messages[1].role"),
        (RESPONSES, {"input": [*HELLO, {"role": "owner", "content": "a"}]}, "input[1].role"),
        (MESSAGES, {"messages": [*HELLO, {"role": "owner", "content": "a"}]}, "messages[1].role"),
        (CHAT, {"messages": PART}, "messages[0].content[1].type"),
        (RESPONSES, {"input": PART}, "input[0].content[1].type"),
        (MESSAGES, {"messages": PART}, "messages[0].content[1].type"),
    ],
)
def test_c5_errors_point_at_the_element(
    rig: MakeRig, path: str, fields: dict[str, Any], param: str
) -> None:
    assert param_of(post(rig("never said"), path, **fields)).startswith(param)


EFFORTS: dict[str, Any] = {
    CHAT: lambda effort: {"reasoning_effort": effort},
    RESPONSES: lambda effort: {"reasoning": {"effort": effort}},
    MESSAGES: lambda effort: {"output_config": {"effort": effort}},
}


@every_chat
@pytest.mark.parametrize(
    ("effort", "number"),
    [("low", 50), (None, 75), ("max", 100), (1, 1), (37, 37), (100, 100), ("30", 30)],
    ids=str,
)
def test_c7_an_effort_is_a_number_of_v41(rig: MakeRig, path: str, effort: Any, number: int) -> None:
    server = rig("a")
    assert post(server, path, **EFFORTS[path](effort)).status_code == 200
    assert f"Reasoning Effort: {number} (range 1-100" in server.prompt
    off = {"thinking": False} if path == CHAT else {"thinking": {"type": "disabled"}}
    if path != RESPONSES:
        assert post(server, path, **EFFORTS[path](effort), **off).status_code == 200
        assert "Reasoning Effort" not in server.prompt


@both_profiles
@every_chat
@pytest.mark.parametrize("effort", [0, 101, -1, True, 12.5, "bogus"], ids=str)
def test_c7_other_efforts_are_refused(rig: MakeRig, path: str, effort: Any) -> None:
    assert "effort" in param_of(post(rig("never said"), path, **EFFORTS[path](effort)))


@every_chat
def test_c7_v4_has_no_numbers(rig: MakeRig, path: str) -> None:
    server = rig("never said", effort_profile="v4")
    assert "effort" in param_of(post(server, path, **EFFORTS[path](37)))


@pytest.mark.parametrize(
    ("model_type", "encoder", "profile", "head"),
    [
        ("deepseek_v41", None, "v41", "<｜System｜>Reasoning Effort: 75"),
        ("deepseek_v4", "Beyond maximum", "v4", "Reasoning Effort: Absolute maximum"),
        ("deepseek_v4", "Absolute maximum", "v4-preview", "<｜User｜>Hi"),
    ],
    ids=["v41", "released", "preview"],
)
def test_c6_the_checkpoint_decides_the_profile_and_the_log_says_so(
    rig: MakeRig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    model_type: str,
    encoder: str | None,
    profile: str,
    head: str,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    if encoder:
        (tmp_path / "encoding_dsv4.py").write_text(f'TEXT = "{encoder}"')
    caplog.set_level(logging.INFO)
    server = rig("a", folder=tmp_path, effort_profile="auto")
    assert f"chat format {profile} (" in caplog.text
    server.chat()
    assert server.prompt.startswith(f"<｜begin▁of▁sentence｜>{head}")


@both_profiles
def test_c34_the_billing_line_is_dropped_in_every_dialect(rig: MakeRig) -> None:
    server = rig("a")
    for nonce in ("a1", "b2"):
        head = f"x-anthropic-billing-header: cch={nonce};\nYou are an agent."
        post(server, CHAT, messages=[{"role": "system", "content": head}, *HELLO])
        post(server, RESPONSES, instructions=head)
        post(server, MESSAGES, system=head)
    assert len({request.prompt_token_ids for request in server.engine.requests}) == 1
    assert "You are an agent.<｜User｜>" in server.prompt
    assert "billing" not in server.prompt


URLS = {
    "loopback": "http://127.0.0.1:8000/a.png",
    "private": "https://10.0.0.1/a.png",
    "link-local": "http://169.254.169.254/latest/meta-data",
    "name": "https://images.example/a.png",
    "file": "file:///etc/passwd",
    "data": "data:image/png;base64,iVBORw0KGgo=",
}


@both_profiles
@every_chat
@pytest.mark.parametrize("url", URLS.values(), ids=URLS)
def test_c65_an_image_is_refused_by_name_and_nothing_is_fetched(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch, path: str, url: str
) -> None:
    """As long as there is no vision tower, which settles where images may come from."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was fetched")

    server = rig("never said")
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    if path == RESPONSES:
        part = {"type": "input_image", "image_url": url}
    elif path == MESSAGES:
        part = {"type": "image", "source": {"type": "url", "url": url}}
    message = {"role": "user", "content": [part]}
    name = "input" if path == RESPONSES else "messages"
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr("builtins.open", refuse)
        reply = post(server, path, **{name: [message]})
    assert f"{name}[0].content[0]" in param_of(reply)
    assert "images are not supported" in reply.json()["error"]["message"]
    assert not server.engine.requests


@every_chat
def test_c53_large_bodies_are_rendered_beside_the_loop(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    server = rig("a", max_model_len=10**6)
    threads: list[threading.Thread] = []
    encode, submit = ChatEncoder.encode, server.engine.submit

    def encode_here(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return encode(*args, **kwargs)

    def submit_here(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return submit(*args)

    monkeypatch.setattr(ChatEncoder, "encode", encode_here)
    monkeypatch.setattr(server.engine, "submit", submit_here)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 20_000}]}
    if path == RESPONSES:
        body = {"input": "word " * 20_000}
    assert post(server, path, **body).status_code == 200
    rendered, submitted = threads
    assert rendered is not submitted


@pytest.mark.parametrize("case", ["a", "b", "c", "d", "e", "f", "g", "h"])
@pytest.mark.parametrize("profile", ["v4", "v41"])
def test_c68_check_values_over_http(
    rig: MakeRig, v4_tokenizer: Tokenizer, v41_tokenizer: Tokenizer, profile: str, case: str
) -> None:
    tokenizer, want = {
        "v4": (v4_tokenizer, WANT[case][0]),
        "v41": (v41_tokenizer, WANT[case][1]),
    }[profile]
    server = rig("", tokenizer=tokenizer, effort_profile=profile)
    body = check_value_body(case)
    tokens = server.post("/tokenize", **body)["tokens"]
    server.chat(**body)
    prompt = server.engine.requests[0].prompt_token_ids
    assert digest(prompt) == digest(tuple(tokens)) == want


def check_value_body(case: str) -> dict[str, Any]:
    """A case of the table of check values (2.10) as a client sends it."""
    from tests.text import test_check_values as values

    chat = values.CASES[case]
    body: dict[str, Any] = {"messages": chat.messages}
    if chat.tools:
        function = {
            "name": values.T.name,
            "description": values.T.description,
            "parameters": values.T.parameters,
        }
        body["tools"] = [{"type": "function", "function": function}]
    if chat.thinking is False:
        body["chat_template_kwargs"] = {"thinking": False}
    if chat.response_format is not None:
        schema = {"name": "t", "schema": values.SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("<think>", [30, 37947, 32]),
        ("x<｜Assistant｜></think>y", [90, 30, 28217, 88031, 28217, 7339, 37947, 32, 91]),
    ],
    ids=["think", "assistant"],
)
def test_c1_typed_markers_reach_the_engine_as_ordinary_ids(
    rig: MakeRig, v4_tokenizer: Tokenizer, text: str, want: list[int]
) -> None:
    server = rig("", tokenizer=v4_tokenizer, effort_profile="v4")
    server.chat(messages=[{"role": "user", "content": text}], thinking=False)
    ids = server.engine.requests[0].prompt_token_ids
    assert ids == (0, 128803, *want, 128804, 128822)


@both_profiles
@pytest.mark.parametrize("is_strict", [False, True], ids=["repaired", "strict"])
def test_item_83_broken_tool_turns(rig: MakeRig, is_strict: bool) -> None:
    server = rig("a", strict_tool_history=is_strict)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    missing = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, *HELLO]
    orphan = [*HELLO, {"role": "tool", "tool_call_id": "9", "content": "R"}]
    for messages in (missing, orphan):
        reply = post(server, CHAT, messages=messages, tools=TOOLS)
        assert reply.status_code == (400 if is_strict else 200)


@pytest.mark.parametrize("path", [*BODIES, "/v1/nothing", "/v1/models", "/health"])
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_c56_every_response_carries_the_request_id(rig: MakeRig, path: str, method: str) -> None:
    server = rig("a")
    for body in (BODIES.get(path, {}), {"n": "x"}):
        reply = server.http.request(method, path, json=body, headers={"X-Request-Id": "mine"})
        assert reply.headers["x-request-id"] == "mine"
        if path == MESSAGES and method == "POST":
            assert reply.headers["request-id"] == "mine"
    assert server.http.request(method, path).headers["x-request-id"]


@both_profiles
def test_c47_anthropics_client_ignores_pings(rig: MakeRig) -> None:
    steps = [(token_id,) for token_id in rig("").tokenizer.encode("</think>A")]
    server = rig([(), *steps], sse_keep_alive_interval=0.001)

    async def run() -> str:
        gate = server.engine.gate = asyncio.Event()
        transport = httpx2.ASGITransport(app=server.app)
        async with httpx2.AsyncClient(transport=transport) as http:
            client = AsyncAnthropic(api_key="k", base_url="http://test", http_client=http)
            asyncio.get_running_loop().call_later(0.02, gate.set)
            async with client.messages.stream(
                model="tiny", max_tokens=50, messages=HELLO
            ) as stream:
                return await stream.get_final_text()

    assert asyncio.run(run()) == "A"
