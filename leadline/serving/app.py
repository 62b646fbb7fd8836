"""The ASGI application: routes, error handlers, and what every request passes through."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leadline.config.server import ServerConfig
from leadline.core.client import EngineClient
from leadline.core.errors import LeadlineError
from leadline.serving import admin
from leadline.serving.console import console_routes
from leadline.serving.context import ModelInfo, Server
from leadline.serving.dialect import error_response, on_error
from leadline.serving.metrics import ServingMetrics
from leadline.serving.openai.chat import chat_completions
from leadline.serving.openai.completions import completions
from leadline.serving.tracing import TraceParent
from leadline.text.tokenizer import Tokenizer

_PROBES = ("/health", "/metrics", "/version")
_NOTHING_SENT = 499  # nginx's code for a client that left
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def build_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    model_info: ModelInfo,
    server_config: ServerConfig,
) -> Starlette:
    """The server over one engine; whoever made ``client`` also closes it.

    Raises:
        ConfigError: the tokenizer lacks a marker that prompts need.
    """
    server = Server(client, tokenizer, model_info, server_config)
    app = Starlette(
        routes=[
            *_both("/chat/completions", chat_completions, "POST"),
            *_both("/completions", completions, "POST"),
            *_both("/models", admin.models, "GET"),
            *_both("/models/{model:path}", admin.model, "GET"),
            Route("/health", admin.health),
            Route("/version", admin.version),
            Route("/metrics", admin.metrics),
            *console_routes(),
        ],
        middleware=[
            Middleware(_Envelope, metrics=server.metrics),
            *([] if server.tracer is None else [Middleware(TraceParent, tracer=server.tracer)]),
        ],
        exception_handlers={
            LeadlineError: on_error,
            HTTPException: on_error,
            ClientDisconnect: _nobody_listens,
        },
    )
    app.state.server = server
    return app


def _both(
    path: str, endpoint: Callable[[Request], Awaitable[Response]], method: str
) -> list[Route]:
    """With and without ``/v1``: users paste either base URL (serving-api 4)."""
    return [Route(prefix + path, endpoint, methods=[method]) for prefix in ("/v1", "")]


async def _nobody_listens(_http: Request, _error: Exception) -> Response:
    return Response(status_code=_NOTHING_SENT)


class _Envelope:
    """Gives every request an id that the answer echoes, and counts it (serving-api 12, 14)."""

    def __init__(self, app: ASGIApp, metrics: ServingMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status = _NOTHING_SENT
        start = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (b"x-request-id", request_id.encode("latin-1"))
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status != _NOTHING_SENT:
                raise
            await error_response(error, scope)(scope, receive, send_with_id)
        finally:
            if scope["path"] not in _PROBES:
                self._metrics.count_answer(scope, status, time.perf_counter() - start)
