"""What every request passes through: its id, its count, and the last word on errors."""

from __future__ import annotations

import re
import time
import uuid

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leadline.serving.access import PROBES, local_path
from leadline.serving.dialect import ANTHROPIC, dialect_of, error_response
from leadline.serving.metrics import ServingMetrics

NOTHING_SENT = 499  # nginx's code for a client that left

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_HEADERS, _MAX_HEADER_BYTES = 256, 64 * 1024


class RequestId:
    """Gives every request an id that the answer echoes (serving-api 12; C56)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        ids = [(b"x-request-id", request_id.encode())]
        if dialect_of(scope["path"]) is ANTHROPIC:
            ids.append((b"request-id", request_id.encode()))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *ids]
            await send(message)

        await self._app(scope, receive, send_with_id)


class Counted:
    """Counts requests and their time by method, status and endpoint (serving-api 14)."""

    def __init__(self, app: ASGIApp, metrics: ServingMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if local_path(scope) in PROBES:
            await self._app(scope, receive, send)
            return
        status = NOTHING_SENT
        start = time.perf_counter()

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._metrics.count_answer(scope, status, time.perf_counter() - start)


class Failures:
    """Answers what no endpoint handled: refusals of middleware, and our own mistakes.

    It stands behind CORS, whose headers errors need too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            _check_head(scope)
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            if has_started:
                raise
            await error_response(error, scope)(scope, receive, send)


def _check_head(scope: Scope) -> None:
    num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    if len(scope["headers"]) > _MAX_HEADERS or num_bytes > _MAX_HEADER_BYTES:
        raise HTTPException(
            431,
            f"the request has {len(scope['headers'])} header fields of {num_bytes} bytes; at most "
            f"{_MAX_HEADERS} of {_MAX_HEADER_BYTES} bytes are taken",
        )
