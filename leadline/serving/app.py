"""The ASGI application: routes, error handlers, and what every request passes through."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leadline.config.server import AccessConfig, ServerConfig
from leadline.core.client import EngineClient
from leadline.core.errors import LeadlineError
from leadline.serving import admin
from leadline.serving.access import Access
from leadline.serving.admission import Admitted
from leadline.serving.context import ModelInfo, Server
from leadline.serving.dialect import ANTHROPIC, dialect_of, error_response, on_error
from leadline.serving.metrics import ServingMetrics
from leadline.serving.openai.chat import chat_completions
from leadline.serving.openai.completions import completions
from leadline.text.tokenizer import Tokenizer

Endpoint = Callable[[Request], Awaitable[Response]]

_PROBES = ("/health", "/ping", "/metrics", "/version", "/load")
_NOTHING_SENT = 499  # nginx's code for a client that left
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_HEADERS, _MAX_HEADER_BYTES = 256, 64 * 1024


def build_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    model_info: ModelInfo,
    server_config: ServerConfig,
    engine_settings: Mapping[str, Any] | None = None,
) -> Starlette:
    """The server over one engine; whoever made ``client`` also closes it.

    Args:
        client: the engine.
        tokenizer: of the model.
        model_info: what clients may know of the model.
        server_config: the server's settings.
        engine_settings: the engine's, for ``/server_info``.

    Raises:
        ConfigError: the tokenizer lacks a marker that prompts need, or a setting of the server
            that cannot be used.
    """
    server = Server(client, tokenizer, model_info, server_config, engine_settings)
    access = server_config.access
    # What generates comes in by reservation; everything else is answered beside it.
    admitted = [Middleware(Admitted, admission=server.admission, worker_id=server.worker_id)]
    app = Starlette(
        routes=[
            *_both("/chat/completions", chat_completions, "POST", admitted),
            *_both("/completions", completions, "POST", admitted),
            *_both("/models", admin.models),
            *_both("/models/{model:path}", admin.model),
            Route("/health", admin.health),
            Route("/ping", admin.health),
            Route("/version", admin.version),
            Route("/load", admin.load),
            Route("/metrics", admin.metrics),
            Route("/server_info", admin.server_info),
            *(_admin_routes() if access.enable_admin_endpoints else ()),
        ],
        middleware=[
            Middleware(_Envelope, metrics=server.metrics),
            *_cors(access),
            Middleware(_Failures),
            Middleware(Access, keys=server.keys, config=access),
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
    path: str, endpoint: Endpoint, method: str = "GET", middleware: Sequence[Middleware] = ()
) -> list[Route]:
    """With and without ``/v1``: users paste either base URL (serving-api 4)."""
    return [
        Route(prefix + path, endpoint, methods=[method], middleware=middleware)
        for prefix in ("/v1", "")
    ]


def _admin_routes() -> list[Route]:
    return [
        Route("/reset_prefix_cache", admin.reset_prefix_cache, methods=["POST"]),
        Route("/pause", admin.pause, methods=["POST"]),
        Route("/resume", admin.resume, methods=["POST"]),
    ]


def _cors(access: AccessConfig) -> list[Middleware]:
    """Which pages of other origins may ask; none unless configured (serving-api 12)."""
    origins = ("*",) if access.cors else access.allowed_origins
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=access.allowed_methods,
            allow_headers=access.allowed_headers,
            allow_credentials=access.allow_credentials and not access.cors,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    ]


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
        names = [b"x-request-id"]
        if dialect_of(scope["path"]) is ANTHROPIC:
            names.append(b"request-id")
        status = _NOTHING_SENT
        start = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = [(name, request_id.encode("latin-1")) for name in names]
                message["headers"] = [*message.get("headers", ()), *ids]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if scope["path"] not in _PROBES:
                # The endpoint's name, not the path: clients can invent any number of those.
                handler = getattr(scope.get("endpoint"), "__name__", "none")
                self._metrics.http_requests.labels(scope["method"], str(status), handler).inc()
                self._metrics.http_seconds.labels(scope["method"], handler).observe(
                    time.perf_counter() - start
                )


class _Failures:
    """Answers what no endpoint handled: refusals of middleware, and our own mistakes.

    It stands behind CORS, whose headers errors need too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watch(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            _check_head(scope)
            await self._app(scope, receive, watch)
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
            f"{_MAX_HEADERS} of {_MAX_HEADER_BYTES} are taken",
        )
