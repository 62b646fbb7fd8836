"""Streams at the level of the ASGI messages: late headers, keep-alive, clients that leave (R14)."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from starlette.types import Message

from leadline.core.errors import EngineOverloaded
from leadline.serving.sse import EventStream
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
def test_c49_client_that_leaves_aborts_every_choice(rig: MakeRig, stream: bool, n: int) -> None:
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


def test_c47_silence_is_broken_by_comments(rig: MakeRig) -> None:
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


def test_c47_official_client_ignores_comments(rig: MakeRig) -> None:
    async def test(server: Rig, gate: asyncio.Event) -> None:
        transport = httpx2.ASGITransport(app=server.app)
        async with httpx2.AsyncClient(transport=transport) as http:
            client = AsyncOpenAI(api_key="k", base_url="http://test/v1", http_client=http)
            asyncio.get_running_loop().call_later(0.02, gate.set)
            stream = await client.chat.completions.create(
                model="", messages=HELLO, stream=True, extra_body=BODY
            )
            chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "A"

    [a] = rig("").tokenizer.encode("A")
    with_gate(test, rig([(), (a,)], sse_keep_alive_interval=0.001))


def test_r14_a_thousand_clients_leave_at_random_and_nothing_stays_behind(rig: MakeRig) -> None:
    draw = random.Random(14)

    async def leave_after(connection: Connection, num_turns: int) -> None:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        connection.leave.set()
        await connection.task

    async def test(server: Rig, gate: asyncio.Event) -> None:
        gate.set()
        for _ in range(20):
            bodies = [{"stream": draw.random() < 0.5, "n": draw.choice((1, 2))} for _ in range(50)]
            await asyncio.gather(
                *(leave_after(Connection(server, body), draw.randrange(300)) for body in bodies)
            )

    server = rig("abcdefghijklmnop")
    with_gate(test, server)
    admission = server.app.state.server.admission
    assert admission.num_open == 0
    text = server.http.get("/metrics").text
    ended = dict(re.findall(r'request_success_total\{.*reason="(\w+)".*\} (\d+)', text))
    assert sum(map(int, ended.values())) == len(server.engine.requests)
    assert int(ended["abort"]) > 0, "some left before the end"
    assert int(ended["stop"]) > 0, "and some after it"


def test_what_goes_wrong_while_sending_is_not_swallowed() -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: 1\n\n"
        finally:
            closed.set()

    async def send(_message: Message) -> None:
        raise RuntimeError("broken")

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    scope = {"type": "http", "path": "/v1/chat/completions", "state": {"request_id": "r"}}
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(EventStream(events(), keep_alive=0)(scope, receive, send))
    assert closed.is_set()
