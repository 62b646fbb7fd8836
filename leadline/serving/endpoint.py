"""What every generating endpoint does between a request and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from leadline.serving.context import Caller, Server, caller_of, server_of
from leadline.serving.sse import EventStream, until_gone

T = TypeVar("T")

# Below this many bytes, decoding and tokenising take less than handing them to a thread gains.
_SMALL_BODY = 16 * 1024


class Answer(Protocol):
    """The answer to a request that was checked and encoded; it begins when it is read.

    Attributes:
        is_stream: which of the two forms the client wants.
    """

    is_stream: bool

    def events(self) -> AsyncGenerator[bytes, None]: ...

    async def whole(self) -> Any: ...


async def respond(http: Request, answer: Callable[[Server, bytes, Caller], Answer]) -> Response:
    """Read, check and answer a request.

    Args:
        http: the request.
        answer: ``(server, body, who asks)`` -> the answer; raises what is a client's mistake.
    """
    answered = await _prepared(http, answer)
    if answered.is_stream:
        keep_alive = server_of(http).config.sse_keep_alive_interval
        return EventStream(answered.events(), keep_alive=keep_alive)
    return json_response(await until_gone(http, answered.whole()))


async def reply(http: Request, work: Callable[[Server, bytes, Caller], Any]) -> Response:
    """Read a request and answer it without the engine."""
    return json_response(await _prepared(http, work))


async def _prepared(http: Request, work: Callable[[Server, bytes, Caller], T]) -> T:
    """Read a body, decode and tokenise it; a large one in a thread, so that streams go on (C53)."""
    server = server_of(http)
    raw = await server.bodies.read(http)
    caller = caller_of(http)
    if len(raw) <= _SMALL_BODY:
        return work(server, raw, caller)
    return await asyncio.to_thread(work, server, raw, caller)


def json_response(body: Any) -> Response:
    """200 with anything that ``msgspec`` encodes."""
    return Response(msgspec.json.encode(body), media_type="application/json")
