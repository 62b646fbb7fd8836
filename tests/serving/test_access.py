"""Keys, cross-origin pages, and what is open to everybody."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from leadline.core.errors import BadRequest, ConfigError
from leadline.serving.context import Caller, caller_of
from tests.serving.conftest import HELLO, MakeRig, Rig

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BODY = {"messages": HELLO}
KEYS = {"api_key": ("good", "other"), "admin_api_key": "root"}
ADMIN = {**KEYS, "enable_admin_endpoints": True}


@pytest.mark.parametrize("key", ["good", "other", "root"])
@pytest.mark.parametrize(
    "form", ["Authorization: Bearer {}", "authorization: bearer {}", "x-api-key: {}", "api-key: {}"]
)
def test_c55_a_key_is_taken_in_every_form(rig: MakeRig, form: str, key: str) -> None:
    name, _, value = form.format(key).partition(": ")
    reply = rig("</think>a", **KEYS).http.post(CHAT, json=BODY, headers={name: value})
    assert reply.status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/server_info", "/nothing", "/health/"])
@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer bad"}, {"Authorization": "Basic good"}, {"x-api-key": "goo"}],
    ids=str,
)
def test_c55_anything_else_is_401(rig: MakeRig, path: str, headers: dict[str, str]) -> None:
    server = rig("a", **KEYS)
    reply = server.http.post(path, json=BODY, headers=headers)
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.headers["x-request-id"]
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert not server.engine.requests


def test_c55_a_refusal_speaks_the_dialect_of_its_endpoint(rig: MakeRig) -> None:
    reply = rig("a", **KEYS).http.post(MESSAGES, json=BODY)
    assert reply.status_code == 401
    assert reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "authentication_error"
    assert reply.headers["request-id"] == reply.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/load", "/metrics"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_c55_probes_are_open(rig: MakeRig, path: str, method: str) -> None:
    assert rig("a", **KEYS).http.request(method, path).status_code == 200


def test_c55_options_need_no_key(rig: MakeRig) -> None:
    assert rig("a", **KEYS).http.options(CHAT).status_code == 405
    reply = rig("a", cors=True, **KEYS).http.options(
        CHAT, headers={"Origin": "https://a.b", "Access-Control-Request-Method": "POST"}
    )
    assert reply.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1//models",
        "/v1/models/",
        "/V1/Models",
        "/v1/%6dodels",
        "/health/../v1/models",
        "/health//",
        "/metrics/",
        "/anthropic/v1/messages",
        "/models",
        "/v1/v1/models",
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT"])
def test_c55_no_spelling_of_a_path_gets_past_the_keys(rig: MakeRig, path: str, method: str) -> None:
    reply = rig("a", **KEYS).http.request(method, path, follow_redirects=False)
    assert reply.status_code == 401


@pytest.mark.parametrize("path", ["/pause/", "/Pause", "/pause%2f", "/%70ause"])
def test_no_spelling_of_a_path_gets_past_the_admins_key(rig: MakeRig, path: str) -> None:
    server = rig("a", **ADMIN)
    reply = server.http.post(path, headers={"x-api-key": "good"})
    assert reply.status_code in (403, 404)
    assert not server.engine.is_paused


def test_a_key_may_hold_any_character(rig: MakeRig) -> None:
    server = rig("a", api_key=("clé",))
    for key, status in {"clé": 200, "cle": 401}.items():
        reply = server.http.get("/v1/models", headers={b"x-api-key": key.encode()})
        assert reply.status_code == status


def test_metrics_can_be_protected(rig: MakeRig) -> None:
    server = rig("a", protect_metrics=True, **KEYS)
    assert server.http.get("/metrics").status_code == 401
    assert server.http.get("/metrics", headers={"api-key": "good"}).status_code == 200


@pytest.mark.parametrize("key", ["", " "], ids=["empty", "blank"])
def test_an_empty_key_is_refused(rig: MakeRig, key: str) -> None:
    with pytest.raises(ConfigError, match="an api_key is empty"):
        rig("a", api_key=("good", key))


def test_without_keys_every_key_is_taken(rig: MakeRig) -> None:
    server = rig("</think>a")
    for headers in ({}, {"Authorization": "Bearer anything"}):
        assert server.http.post(CHAT, json=BODY, headers=headers).status_code == 200


def test_keys_come_from_a_file(rig: MakeRig, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n first \n\nsecond\n")
    server = rig("</think>a", api_key_file=str(file))
    for key, status in {"first": 200, "second": 200, "# ours": 401, "": 401}.items():
        assert server.http.get("/v1/models", headers={"api-key": key}).status_code == status


@pytest.mark.parametrize("text", [None, "", "# none\n"], ids=["absent", "empty", "comment"])
def test_a_file_without_keys_is_an_error(rig: MakeRig, tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="api_key_file"):
        rig("a", api_key_file=str(file))


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/pause", "/resume"])
def test_admin_endpoints_need_the_admins_key(rig: MakeRig, path: str) -> None:
    server = rig("a", **ADMIN)
    for key, status in {"root": 200, "good": 403, "bad": 401}.items():
        reply = server.http.post(path, headers={"x-api-key": key})
        assert reply.status_code == status, key
        if status == 403:
            assert reply.json()["error"]["type"] == "permission_error"
    closed = rig("a", **KEYS)
    assert closed.http.post(path, headers={"x-api-key": "root"}).status_code == 404


def test_admin_endpoints_without_an_admins_key_are_refused(rig: MakeRig) -> None:
    with pytest.raises(ConfigError, match="enable_admin_endpoints needs an admin_api_key"):
        rig("a", enable_admin_endpoints=True)


def test_item_95_keys_and_texts_are_shown_nowhere(
    rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keys = {"api_key": ("k-user-1", "k-user-2"), "admin_api_key": "k-root"}
    server = rig("reasons</think>answers", **keys, enable_admin_endpoints=True)
    good = {"x-api-key": "k-user-2"}
    body = {"messages": [{"role": "user", "content": "confidential"}]}
    server.http.post(CHAT, json=body, headers=good)
    server.http.post(CHAT, json=body, headers={"x-api-key": "k-wrong"})
    server.http.post(CHAT, json=body | {"max_tokens": 0}, headers=good)
    info = server.http.get("/server_info", headers=good)
    assert info.json()["settings"]["server"]["access"]["api_key"] == "***"
    assert info.json()["settings"]["server"]["access"]["admin_api_key"] == "***"
    seen = caplog.text + info.text + server.http.get("/metrics").text
    for word in ("k-user", "k-root", "k-wrong", "confidential", "reasons", "answers"):
        assert word not in seen


ORIGIN = {"Origin": "https://page.example"}


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        ({}, None),
        ({"cors": True}, "*"),
        ({"allowed_origins": ("https://page.example",)}, "https://page.example"),
        ({"allowed_origins": ("https://other.example",)}, None),
    ],
    ids=["off", "all", "this", "another"],
)
@pytest.mark.parametrize("status", [200, 401, 404, 400, 500])
def test_item_94_answers_and_errors_carry_cors_headers(
    rig: MakeRig, config: dict[str, Any], allowed: str | None, status: int
) -> None:
    script: Any = [RuntimeError("broken")] if status == 500 else "</think>a"
    server = rig(script, end=status != 500, **KEYS, **config)
    headers = ORIGIN if status == 401 else {**ORIGIN, "x-api-key": "good"}
    path = "/v1/nothing" if status == 404 else CHAT
    body: Any = {"messages": []} if status == 400 else BODY
    reply = server.http.post(path, json=body, headers=headers)
    assert reply.status_code == status
    assert reply.headers.get("access-control-allow-origin") == allowed
    if allowed:
        exposed = reply.headers["access-control-expose-headers"]
        assert {"X-Request-Id", "Retry-After"} <= set(exposed.split(", "))


def caller(server: Rig, key: str = "", **headers: str) -> Caller:
    """Who asks with these headers; underscores in their names stand for dashes."""
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    state = {"request_id": "r", "key": key}
    return caller_of(Request({"type": "http", "app": server.app, "headers": raw, "state": state}))


def test_c59_isolation_gives_each_key_or_user_a_salt_of_its_own(rig: MakeRig) -> None:
    shared, by_key, by_user = (
        rig("a", cache_isolation=name) for name in ("none", "api-key", "user")
    )
    assert caller(shared, "k1").cache_salt(None, "u1") is None
    assert caller(shared, "k1").cache_salt("s", "u1") == "s"
    salts = [caller(by_key, key).cache_salt(salt) for key in ("k1", "k2") for salt in ("s", None)]
    assert len(set(salts)) == 4
    assert caller(by_key, "k1").cache_salt("s", "u1") == caller(by_key, "k1").cache_salt("s", "u2")
    assert caller(by_user, "k1").cache_salt("s", "u1") == caller(by_user, "k2").cache_salt(
        "s", "u1"
    )
    assert caller(by_user).cache_salt("s", "u1") != caller(by_user).cache_salt("s", "u2")


def test_the_first_name_of_a_session_counts(rig: MakeRig) -> None:
    """In the order of serving-api 13.1."""
    server = rig("a")
    assert caller(server).session_key() is None
    body = {"session_id": "body", "prompt_cache_key": "cache", "user": "user"}
    both = {"x_session_id": "header", "x_claude_code_session_id": "agent"}
    assert caller(server, **both).session_key(**body) == "body"
    del body["session_id"]
    assert caller(server, **both).session_key(**body) == "header"
    assert caller(server, x_claude_code_session_id="agent").session_key(**body) == "agent"
    assert caller(server, session_id="dash").session_key(**body) == "dash"
    assert caller(server).session_key(**body) == "cache"
    assert caller(server).session_key(user="user") == "user"
    other = rig("a", session_affinity_headers=("x-thread",))
    assert caller(other, x_thread="t", session_id="dash").session_key(**body) == "t"


@pytest.mark.parametrize("rank", ["1", "-1", "x", "", "9" * 5000, "²"], ids=lambda r: r[:3])
def test_c58_a_rank_that_does_not_exist_is_refused(rig: MakeRig, rank: str) -> None:
    assert caller(rig("a"), x_data_parallel_rank="0").rank == 0
    with pytest.raises(BadRequest, match="X-data-parallel-rank") as error:
        caller(rig("a"), x_data_parallel_rank=rank)
    assert error.value.param == "X-data-parallel-rank"


@pytest.mark.parametrize(
    ("configured", "asked", "seconds"),
    [(None, None, None), (5.0, None, 5.0), (None, "1500", 1.5), (5.0, "1500", 1.5), (1, "1500", 1)],
    ids=str,
)
def test_the_shorter_deadline_counts(
    rig: MakeRig, configured: float | None, asked: str | None, seconds: float | None
) -> None:
    headers = {"x_request_timeout_ms": asked} if asked else {}
    server = rig("a", request_timeout=configured)
    assert caller(server, **headers).timeout_seconds == seconds


@pytest.mark.parametrize("asked", ["0", "-5", "1.5", "soon"])
def test_a_deadline_that_is_no_number_is_refused(rig: MakeRig, asked: str) -> None:
    headers = {"X-Request-Timeout-Ms": asked}
    reply = rig("a").http.post(CHAT, content=json.dumps(BODY), headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "X-Request-Timeout-Ms"
