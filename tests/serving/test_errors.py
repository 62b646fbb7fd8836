"""What each kind of bad request gets (serving-api 11), and that the engine never sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leadline.core.errors import BadRequest, EngineDead, EngineOverloaded, RequestTimeout
from tests.serving.conftest import HELLO, MakeRig

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOOL = {"type": "function", "function": {"name": "f"}}
LONG = "long " * 1000


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


# path, body or its change, status, code, param, words of the message
CASES: dict[str, tuple[str, Any, int, str | None, str | None, str]] = {
    "malformed": (CHAT, b"{", 400, "invalid_json", None, "not valid JSON"),
    "empty-body": (CHAT, b"", 400, "invalid_json", None, "not valid JSON"),
    "not-an-object": (CHAT, b"[]", 400, "invalid_json", None, "Expected `object`"),
    "bad-utf8": (CHAT, b'{"messages":[{"role":"\xff"}]}', 400, "invalid_json", None, ""),
    "nan": (CHAT, b'{"temperature":NaN,"messages":[]}', 400, "invalid_json", None, ""),
    "overflow": (CHAT, b'{"top_p":1e999,"messages":[]}', 400, "invalid_json", "top_p", "range"),
    "too-deep": (CHAT, b'{"x":' + b"[" * 99999, 400, "invalid_json", None, "nested too deeply"),
    "no-messages": (CHAT, b"{}", 400, "invalid_value", "messages", "missing"),
    "empty-messages": (CHAT, {"messages": []}, 400, "invalid_value", "messages", "empty"),
    "messages-string": (CHAT, {"messages": "x"}, 400, "invalid_value", "messages", "array"),
    "role": (
        CHAT, {"messages": [{"role": "owner", "content": ""}]},
        400, "invalid_value", "messages[0].role", "'owner'",
    ),
    "image": (
        CHAT, {"messages": user(["a", IMAGE])},
        400, "not_supported", "messages[0].content[1].type", "image_url",
    ),
    "part": (
        CHAT, {"messages": user([{"type": "audio"}])},
        400, "invalid_value", "messages[0].content[0].type", "'audio'",
    ),
    "content-number": (
        CHAT, {"messages": user(3)}, 400, "invalid_value", "messages[0].content", "3",
    ),
    "prefix-elsewhere": (
        CHAT, {"messages": [{"role": "user", "content": "", "prefix": True}, *HELLO]},
        400, "invalid_value", "messages[0].prefix", "prefix",
    ),
    "model": (CHAT, {"model": "other"}, 404, "model_not_found", "model", "'other'"),
    "too-long": (
        CHAT, {"messages": user("a b " * 9000)},
        400, "context_length_exceeded", "messages", "maximum context length is 8192 tokens",
    ),
    "temperature-bool": (CHAT, {"temperature": True}, 400, "invalid_value", "temperature", "bool"),
    "temperature-text": (CHAT, {"temperature": "1"}, 400, "invalid_value", "temperature", "str"),
    "temperature": (CHAT, {"temperature": 2.1}, 400, "invalid_value", "temperature", "2.1"),
    "top_p": (CHAT, {"top_p": 0}, 400, "invalid_value", "top_p", "(0, 1]"),
    "top_k": (CHAT, {"top_k": -2}, 400, "invalid_value", "top_k", "-2"),
    "min_p": (CHAT, {"min_p": 1.5}, 400, "invalid_value", "min_p", "1.5"),
    "penalty": (CHAT, {"presence_penalty": 3}, 400, "invalid_value", "presence_penalty", "3"),
    "repetition": (
        CHAT, {"repetition_penalty": 0}, 400, "invalid_value", "repetition_penalty", "0",
    ),
    "seed": (CHAT, {"seed": 2**63}, 400, "invalid_value", "seed", ""),
    "n": (CHAT, {"n": 0}, 400, "invalid_value", "n", "128"),
    "max_tokens": (CHAT, {"max_tokens": 0}, 400, "invalid_value", "max_tokens", "at least 1"),
    "max_tokens-float": (CHAT, {"max_tokens": 1.5}, 400, "invalid_value", "max_tokens", "float"),
    "min_tokens": (
        CHAT, {"min_tokens": 9, "max_tokens": 8}, 400, "invalid_value", "min_tokens", "9",
    ),
    "stop-empty": (CHAT, {"stop": [""]}, 400, "invalid_value", "stop", "empty"),
    "stop-many": (CHAT, {"stop": ["x"] * 17}, 400, "invalid_value", "stop", "16"),
    "stop-type": (CHAT, {"stop": [1]}, 400, "invalid_value", "stop[0]", "int"),
    "bias-key": (CHAT, {"logit_bias": {"a": 1}}, 400, "invalid_value", "logit_bias", "'a'"),
    "bias-id": (CHAT, {"logit_bias": {"1024": 1}}, 400, "invalid_value", "logit_bias", "1024"),
    "bias-value": (CHAT, {"logit_bias": {"1": 101}}, 400, "invalid_value", "logit_bias", "101"),
    "top_logprobs": (
        CHAT, {"logprobs": True, "top_logprobs": 21},
        400, "invalid_value", "top_logprobs", "0..20",
    ),
    "top_logprobs-alone": (
        CHAT, {"top_logprobs": 2}, 400, "invalid_value", "top_logprobs", "logprobs: true",
    ),
    "effort": (
        CHAT, {"reasoning_effort": "bogus"}, 400, "invalid_value", "reasoning_effort", "bogus",
    ),
    "effort-range": (
        CHAT, {"reasoning_effort": 101}, 400, "invalid_value", "reasoning_effort", "101",
    ),
    "thinking": (
        CHAT, {"thinking": {"type": "maybe"}}, 400, "invalid_value", "thinking.type", "'maybe'",
    ),
    "tool-type": (
        CHAT, {"tools": [{"type": "custom"}]}, 400, "invalid_value", "tools[0].type", "'custom'",
    ),
    "tool-name": (
        CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        400, "invalid_value", "tools[0]", "'a b'",
    ),
    "tool_choice": (
        CHAT, {"tools": [TOOL], "tool_choice": "always"},
        400, "invalid_value", "tool_choice", "'always'",
    ),
    "response_format": (
        CHAT, {"response_format": {"type": "poem"}},
        400, "invalid_value", "response_format.type", "'poem'",
    ),
    "structured_outputs": (
        CHAT, {"structured_outputs": {"json": {}, "regex": "a"}},
        400, "invalid_value", "structured_outputs", "it has json, regex",
    ),
    "guided_json": (
        CHAT, {"guided_json": {"type": "object"}},
        400, "not_supported", "guided_json", "structured_outputs",
    ),
    "prompt_logprobs": (
        CHAT, {"prompt_logprobs": 21}, 400, "invalid_value", "prompt_logprobs", "prompt_logprobs",
    ),
    "chat_template": (CHAT, {"chat_template": "x"}, 400, "not_supported", "chat_template", ""),
    "thinking-budget": (
        CHAT, {"thinking_token_budget": -2},
        400, "invalid_value", "thinking_token_budget", "-2",
    ),
    "prompt-missing": (COMPLETIONS, b"{}", 400, "invalid_value", "prompt", "missing"),
    "prompt-empty": (COMPLETIONS, {"prompt": ""}, 400, "invalid_value", "prompt", "empty"),
    "prompts-none": (COMPLETIONS, {"prompt": []}, 400, "invalid_value", "prompt", "0 prompts"),
    "prompt-mixed": (COMPLETIONS, {"prompt": ["a", 1]}, 400, "invalid_value", "prompt", "mixes"),
    "prompt-id": (COMPLETIONS, {"prompt": [1024]}, 400, "invalid_value", "prompt", "1024"),
    "prompt-long": (
        COMPLETIONS, {"prompt": [5] * 8192},
        400, "context_length_exceeded", "prompt", "8192 tokens > 8191 maximum",
    ),
    "best_of": (COMPLETIONS, {"best_of": 2}, 400, "invalid_value", "best_of", "2"),
    "no-tokens": (COMPLETIONS, {"max_tokens": 0}, 400, "invalid_value", "max_tokens", "echo"),
    "no-such-path": ("/v1/nothing", {}, 404, None, None, "/v1/nothing"),
    "doubled-v1": ("/v1/v1/chat/completions", {}, 404, None, None, "one /v1"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_c44_bad_request_is_named_before_any_stream(rig: MakeRig, case: Any, stream: bool) -> None:
    path, body, status, code, param, words = case
    if not isinstance(body, bytes):
        default = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
        body = json.dumps(default | {"stream": stream} | body).encode()
    server = rig("never said")
    reply = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (status, code, param)
    assert words in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert "x-request-id" in reply.headers
    assert not server.engine.requests


def test_wrong_method_names_the_right_one(rig: MakeRig) -> None:
    reply = rig("").http.get(CHAT)
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "headers",
    [{"Content-Type": "text/plain"}, {"Content-Encoding": "br"}],
    ids=["type", "encoding"],
)
def test_other_content_is_415(rig: MakeRig, headers: dict[str, str]) -> None:
    reply = rig("").http.post(CHAT, content=b"{}", headers=headers)
    assert reply.status_code == 415
    assert next(iter(headers)) in reply.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True], ids=["by-length", "while-reading"])
def test_body_over_the_limit_is_413(rig: MakeRig, chunked: bool) -> None:
    server = rig("", max_request_bytes=100)
    body = b'{"x":"' + b"x" * 100 + b'"}'
    content: Any = iter([body[:60], body[60:]]) if chunked else body
    headers = {"Content-Type": "application/json"}
    reply = server.http.post(CHAT, content=content, headers=headers)
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (BadRequest("larger than the cache", code="context_length_exceeded"), 400, None),
        (EngineOverloaded("the queue is full"), 503, "server_overloaded"),
        (EngineDead("the engine process has ended"), 500, "internal_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_c44_refusal_of_the_engine_keeps_its_status(
    rig: MakeRig, stream: bool, refusal: Exception, status: int, code: str | None
) -> None:
    server = rig("")
    server.engine.refuse = refusal
    reply = server.http.post(CHAT, json={"messages": HELLO, "stream": stream})
    assert reply.status_code == status
    assert reply.json()["error"]["code"] == (code or "context_length_exceeded")
    assert reply.json()["error"]["message"] == str(refusal)
    assert ("retry-after" in reply.headers) == (status == 503)


def test_engine_death_in_a_stream_is_an_event_and_then_done(rig: MakeRig) -> None:
    server = rig([(66,), EngineDead("the engine process has ended")], end=False)
    chunks = server.stream(thinking={"type": "disabled"})
    assert chunks[1]["choices"][0]["delta"]["content"] == server.tokenizer.decode((66,))
    assert chunks[-1] == {
        "error": {
            "message": "the engine process has ended",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_deadline_before_the_first_token_is_504(rig: MakeRig, stream: bool) -> None:
    server = rig([RequestTimeout("it took longer than 2 s")], end=False)
    reply = server.http.post(CHAT, json={"messages": HELLO, "stream": stream})
    assert reply.status_code == 504
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")


def test_a_deadline_in_a_stream_is_an_event(rig: MakeRig) -> None:
    server = rig([(66,), RequestTimeout("it took longer than 2 s")], end=False)
    chunks = server.stream(thinking={"type": "disabled"})
    assert chunks[-1]["error"]["code"] == "request_timeout"


def test_unexpected_error_hides_its_text(rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    server = rig([RuntimeError("prompt: secret")], end=False)
    reply = server.http.post(CHAT, json={"messages": HELLO})
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert "x-request-id" in reply.headers
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": LONG}),
        ("/v1/chat/completions", {"tool_choice": LONG}),
        ("/v1/chat/completions", {"response_format": {"type": LONG}}),
        ("/v1/chat/completions", {"response_format": {"type": "regex", "pattern": [LONG]}}),
        ("/v1/chat/completions", {"logit_bias": {LONG: 1}}),
        ("/v1/chat/completions", {"messages": [{"role": LONG, "content": LONG}]}),
        ("/v1/chat/completions", {"messages": [LONG]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [LONG]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": LONG, "content": LONG}]}),
        ("/v1/messages", {"max_tokens": 1, "tool_choice": {"type": LONG}}),
        ("/v1/responses", {"input": [LONG]}),
        ("/v1/responses", {"input": [{"type": LONG}]}),
        ("/v1/responses", {"input": "Hi", "truncation": LONG}),
        ("/v1/responses", {"input": "Hi", "previous_response_id": LONG}),
        ("/v1/responses", {"input": "Hi", "tools": [{"type": LONG}]}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_error_quotes_little_of_a_value(rig: MakeRig, path: str, body: dict[str, Any]) -> None:
    reply = rig("a").http.post(path, json={"messages": HELLO} | body)
    assert 400 <= reply.status_code < 500
    assert len(reply.json()["error"]["message"]) < 500
