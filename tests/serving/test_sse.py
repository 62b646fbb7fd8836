"""Streams at the level of the ASGI messages: late headers, keep-alive, clients that leave (R14)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message

from leadline.core.errors import EngineOverloaded
from tests.serving.conftest import HELLO, MakeRig, Rig

BODY = {"messages": HELLO, "thinking": {"type": "disabled"}}


class Connection:
    """One HTTP exchange in which the test decides when the client reads and leaves."""

    def __init__(self, server: Rig, body: dict[str, Any]) -> None:
        self.sent: list[Message] = []
        self.leave = asyncio.Event()
        self.arrived = asyncio.Condition()
        self._body = json.dumps(BODY | body).encode()
        self._is_read = False
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.create_task(server.app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        async with self.arrived:
            self.sent.append(message)
            self.arrived.notify_all()

    async def until(self, text: bytes) -> None:
        """Wait until ``text`` was sent."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: text in self.data)

    @property
    def data(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def with_gate(test: Callable[[Rig, asyncio.Event], Awaitable[None]], server: Rig) -> None:
    """Run a test in whose engine every step but the first waits for an event."""

    async def run() -> None:
        server.engine.gate = asyncio.Event()
        await asyncio.wait_for(test(server, server.engine.gate), timeout=20)

    asyncio.run(run())


@pytest.mark.parametrize("n", [1, 3], ids=lambda n: f"n={n}")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_client_that_leaves_aborts_every_choice(rig: MakeRig, stream: bool, n: int) -> None:
    async def test(server: Rig, _gate: asyncio.Event) -> None:
        connection = Connection(server, {"stream": stream, "n": n})
        while len(server.engine.requests) < n:
            await asyncio.sleep(0)
        connection.leave.set()
        await connection.task
        submitted = sorted(request.request_id for request in server.engine.requests)
        assert sorted(server.engine.aborted) == submitted

    server = rig("never ends")
    with_gate(test, server)
    assert f'finished_reason="abort",model_name="tiny"}} {n}.0' in server.http.get("/metrics").text


def test_event_goes_out_before_the_next_token(rig: MakeRig) -> None:
    async def test(server: Rig, gate: asyncio.Event) -> None:
        connection = Connection(server, {"stream": True})
        await connection.until(b'"content":"A"')
        gate.set()
        await connection.task
        assert connection.data.endswith(b"data: [DONE]\n\n")

    a, b = rig("").tokenizer.encode("AB")
    with_gate(test, rig([(a,), (b,)]))


def test_silence_is_broken_by_comments(rig: MakeRig) -> None:
    async def test(server: Rig, gate: asyncio.Event) -> None:
        connection = Connection(server, {"stream": True})
        await connection.until(b": keep-alive\n\n: keep-alive\n\n")
        gate.set()
        await connection.task
        assert connection.data.endswith(b"data: [DONE]\n\n")

    with_gate(test, rig([(), (66,)], sse_keep_alive_interval=0.001))


def test_error_after_a_comment_is_an_event(rig: MakeRig) -> None:
    async def test(server: Rig, gate: asyncio.Event) -> None:
        connection = Connection(server, {"stream": True})
        await connection.until(b": keep-alive\n\n")
        gate.set()
        await connection.task
        assert b'data: {"error":{"message":"the server ended' not in connection.data
        assert b'data: {"error":{"message":"busy"' in connection.data
        assert connection.data.endswith(b"data: [DONE]\n\n")

    script: list[Any] = [(), EngineOverloaded("busy")]
    with_gate(test, rig(script, sse_keep_alive_interval=0.001))


def test_line_separators_are_escaped(rig: MakeRig) -> None:
    reply = rig("</think>a\u2028b\u2029c").http.post(
        "/v1/chat/completions", json={"messages": HELLO, "stream": True}
    )
    assert "\u2028" not in reply.text
    assert "\\u2028" in reply.text
