"""Server-sent events: late headers, keep-alive comments, and clients that leave.

Headers are sent with the first event or the first keep-alive comment, so an error that shows up
before keeps its real status code (serving-api 10, C44).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leadline.serving.dialect import dialect_of, error_response
from leadline.serving.errors import describe

T = TypeVar("T")

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream(Response):
    """Sends events as they come and the dialect's end, also after an error.

    Whatever ends the response, a client that leaves included, closes ``events``.

    Args:
        events: each item is one or more whole events.
        keep_alive: seconds of silence before a comment line; 0 is off.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], *, keep_alive: float) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._keep_alive = keep_alive
        self._lock = asyncio.Lock()
        self._has_started = False
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(scope, receive, send))
        others = [asyncio.ensure_future(_client_gone(receive))]
        if self._keep_alive:
            comment = dialect_of(scope["path"]).keep_alive
            others.append(asyncio.ensure_future(self._beat(send, comment)))
        try:
            await asyncio.wait({writer, *others}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(writer, *others)
        if not writer.cancelled():
            writer.result()

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        dialect = dialect_of(scope["path"])
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    await self._send(send, data)
        except Exception as error:
            async with self._lock:
                if not self._has_started:
                    self._has_started = True
                    await error_response(error, scope)(scope, receive, send)
                    return
            failure = describe(error)
            await self._send(send, dialect.error_event(failure, scope["state"]["request_id"]))
        await self._send(send, dialect.end, more=False)

    async def _beat(self, send: Send, comment: bytes) -> None:
        clock = asyncio.get_running_loop().time
        self._last_sent = clock()
        while True:
            await asyncio.sleep(self._last_sent + self._keep_alive - clock())
            if clock() - self._last_sent >= self._keep_alive:
                await self._send(send, comment)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with self._lock:  # events and comments come from two tasks
            if not self._has_started:
                self._has_started = True
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self._last_sent = asyncio.get_running_loop().time()


async def until_gone(http: Request, work: Awaitable[T]) -> T:
    """Wait for the whole answer; cancel ``work`` when the client leaves before.

    Raises:
        ClientDisconnect: nobody is there to read an answer.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_client_gone(http.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _cancel(task, gone)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
