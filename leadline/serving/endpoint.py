"""What every generating endpoint does between a request and its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from leadline.serving.body import read_body
from leadline.serving.context import Caller, Server, caller_of, prepare, server_of
from leadline.serving.sse import EventStream, until_gone


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
    server = server_of(http)
    raw = await read_body(http, server.config.max_request_bytes)
    caller = caller_of(http)
    answered = await prepare(raw, lambda: answer(server, raw, caller))
    if answered.is_stream:
        return EventStream(answered.events(), keep_alive=server.config.sse_keep_alive_interval)
    return json_response(await until_gone(http, answered.whole()))


async def reply(http: Request, work: Callable[[Server, bytes, Caller], Any]) -> Response:
    """Read a request and answer it without the engine."""
    server = server_of(http)
    raw = await read_body(http, server.config.max_request_bytes)
    caller = caller_of(http)
    return json_response(await prepare(raw, lambda: work(server, raw, caller)))


def json_response(body: Any) -> Response:
    """200 with anything that ``msgspec`` encodes."""
    return Response(msgspec.json.encode(body), media_type="application/json")
