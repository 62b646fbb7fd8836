"""What every generating endpoint does between a request and its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from leadline.serving.body import read_body
from leadline.serving.context import Caller, Server, caller_of, prepare, server_of
from leadline.serving.openai.schema import GenerationRequest
from leadline.serving.sse import EventStream, until_gone


class Call(Protocol):
    """A request that was checked and encoded."""

    @property
    def body(self) -> GenerationRequest: ...


class Answer(Protocol):
    """The answer to one call, as a stream or whole."""

    def events(self) -> AsyncGenerator[bytes, None]: ...

    async def whole(self) -> Any: ...


CallT = TypeVar("CallT", bound=Call)


async def respond(
    http: Request,
    parse: Callable[[Server, bytes, Caller], CallT],
    answer: Callable[[Server, CallT, str], Answer],
) -> Response:
    """Read, parse and answer a request.

    Args:
        http: the request.
        parse: ``(server, body, who asks)`` -> call; raises what is a client's mistake.
        answer: ``(server, call, request id)`` -> the answer, which begins when it is read.
    """
    server = server_of(http)
    raw = await read_body(http, server.config.max_request_bytes)
    caller = caller_of(http)
    call = await prepare(raw, lambda: parse(server, raw, caller))
    answered = answer(server, call, caller.request_id)
    if call.body.stream:
        return EventStream(answered.events(), keep_alive=server.config.sse_keep_alive_interval)
    whole = await until_gone(http, answered.whole())
    return Response(msgspec.json.encode(whole), media_type="application/json")
