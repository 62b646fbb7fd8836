"""Overload is refused before any work, and everything else goes on (R12)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import httpx
import httpx2
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from leadline.config.args import from_values
from leadline.config.server import ServerConfig
from leadline.serving.app import build_app
from leadline.text.tokenizer import Tokenizer
from tests.serving.conftest import HELLO, MODEL_INFO, MakeRig, Rig
from tests.serving.test_body import exchange

CHAT = "/v1/chat/completions"
BODY = {"messages": HELLO, "thinking": {"type": "disabled"}}


def bounded(server: Rig, max_open: int, **config: Any) -> Rig:
    """The same engine behind an application that takes ``max_open`` requests."""
    info = replace(MODEL_INFO, max_open=max_open)
    app = build_app(server.engine, server.tokenizer, info, from_values(ServerConfig, config))
    return replace(server, app=app)


@asynccontextmanager
async def one_open(server: Rig) -> AsyncIterator[httpx.AsyncClient]:
    """A client, while one request of it runs; the engine's gate ends it."""
    gate = server.engine.gate = asyncio.Event()
    transport = httpx.ASGITransport(app=server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        first = asyncio.create_task(http.post(CHAT, json=BODY))
        while not server.engine.requests:
            await asyncio.sleep(0)
        yield http
        gate.set()
        assert (await first).status_code == 200


def test_r12_a_full_server_refuses_at_once_and_answers_everything_else(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = bounded(rig("ab"), 1)
    seen: list[Any] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer,
        "encode",
        lambda *args: seen.append(args) or encode(*args),  # type: ignore[func-returns-value]
    )

    async def run() -> None:
        async with one_open(server) as http:
            seen.clear()
            for stream in (False, True):
                reply = await http.post(CHAT, json=BODY | {"stream": stream})
                assert reply.status_code == 503
                error = reply.json()["error"]
                assert (error["type"], error["code"]) == ("overloaded_error", "server_overloaded")
                assert int(reply.headers["retry-after"]) >= 1
                assert int(reply.headers["retry-after-ms"]) >= 1000
            assert not seen, "a refused request was tokenised"
            assert (await http.get("/load")).json() == {"server_load": 1}
            for path in ("/health", "/metrics", "/v1/models", "/version"):
                assert (await http.get(path)).status_code == 200

    asyncio.run(run())
    assert server.app.state.server.admission.num_open == 0


def test_r12_a_thousand_requests_at_once_leave_eight_open(rig: MakeRig) -> None:
    server = bounded(rig("ab"), 8)

    async def run() -> None:
        gate = server.engine.gate = asyncio.Event()
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            asks = [asyncio.create_task(http.post(CHAT, json=BODY)) for _ in range(1000)]
            for ask in asks[8:]:
                assert (await ask).status_code == 503
            assert (await http.get("/load")).json() == {"server_load": 8}
            assert (await http.get("/health")).status_code == 200
            gate.set()
            for ask in asks[:8]:
                assert (await ask).status_code == 200

    asyncio.run(run())
    assert len(server.engine.requests) == 8


def test_half_sent_bodies_keep_nobody_out(rig: MakeRig) -> None:
    server = bounded(rig("ab"), 1, max_concurrency_per_key=1)

    async def run() -> None:
        half = [asyncio.create_task(exchange(server, CHAT, [b"{"], is_whole=False)) for _ in "ab"]
        await asyncio.sleep(0)
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            assert (await http.post(CHAT, json=BODY)).status_code == 200
        assert not any(task.done() for task in half)
        for task in half:
            task.cancel()
        await asyncio.wait(half)

    asyncio.run(run())


@pytest.mark.parametrize(
    "body",
    [b"{", b'{"messages": []}', b'{"messages": [{"role": "user", "content": "Hi"}]}'],
    ids=["malformed", "invalid", "engine fails"],
)
def test_a_place_is_given_back_whatever_happens(rig: MakeRig, body: bytes) -> None:
    server = bounded(rig([RuntimeError("broken")], end=False), 1)

    async def run() -> None:
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for _ in range(3):
                reply = await http.post(CHAT, content=body)
                assert reply.status_code in (400, 500)

    asyncio.run(run())
    assert server.app.state.server.admission.num_open == 0


def test_a_key_runs_no_more_requests_at_once_than_it_may(rig: MakeRig) -> None:
    server = rig("ab", max_concurrency_per_key=1)

    async def run() -> None:
        async with one_open(server) as http:
            reply = await http.post(CHAT, json=BODY)
            assert reply.status_code == 429
            assert reply.headers["retry-after"] == "1"
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            assert (await http.post(CHAT, json=BODY)).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("client", [AsyncOpenAI, AsyncAnthropic], ids=["openai", "anthropic"])
@pytest.mark.parametrize("status", [503, 429])
def test_c50_official_clients_wait_as_told_and_succeed(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch, client: Any, status: int
) -> None:
    server = rig("ab", max_concurrency_per_key=1)
    if status == 503:
        server = bounded(server, 1)
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        """Instead of waiting, let the request that holds the place end."""
        waits.append(seconds)
        assert server.engine.gate is not None
        server.engine.gate.set()
        while server.app.state.server.admission.num_open:
            await asyncio.sleep(0)

    async def run() -> None:
        async with one_open(server):
            monkeypatch.setattr(anyio, "sleep", wait)
            transport = httpx2.ASGITransport(app=server.app)
            async with httpx2.AsyncClient(transport=transport) as http:
                asks = client(api_key="k", base_url="http://test", http_client=http, max_retries=2)
                answer = await asks.post(CHAT, body=BODY, cast_to=object)
        assert answer["choices"][0]["message"]["content"] == "ab"

    asyncio.run(run())
    assert waits == [1.0]
