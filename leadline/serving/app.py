"""The ASGI application: routes, error handlers, and what every request passes through."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from leadline.config.server import AccessConfig, ServerConfig
from leadline.core.client import EngineClient
from leadline.core.errors import EngineOverloaded, LeadlineError
from leadline.serving import admin
from leadline.serving.access import Access
from leadline.serving.admission import Admitted
from leadline.serving.console import console_routes
from leadline.serving.context import ModelInfo, Server
from leadline.serving.dialect import on_error
from leadline.serving.middleware import NOTHING_SENT, Counted, Failures, RequestId
from leadline.serving.openapi import openapi
from leadline.serving.responses.store import ResponseStore
from leadline.serving.routes import both, inference_routes
from leadline.serving.tracing import TraceParent
from leadline.text.tokenizer import Tokenizer

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def build_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    model_info: ModelInfo,
    server_config: ServerConfig,
    engine_settings: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> Starlette:
    """The server over one engine; whoever made ``client`` also closes it.

    Args:
        client: the engine.
        tokenizer: of the model.
        model_info: what clients may know of the model.
        server_config: the server's settings.
        engine_settings: the engine's, for ``/server_info``.
        folder: the checkpoint, which decides the chat format (C6); None is a V4.1 without files.

    Raises:
        ConfigError: the tokenizer lacks a marker that prompts need, or a setting of the server
            that cannot be used.
    """
    server = Server(client, tokenizer, model_info, server_config, engine_settings, folder)
    access = server_config.access
    # What generates comes in by reservation; everything else is answered beside it.
    admitted = [Middleware(Admitted, admission=server.admission, worker_id=server.worker_id)]
    app = Starlette(
        routes=[
            *inference_routes(admitted),
            *both("/models", admin.models),
            *both("/models/{model:path}", admin.model),
            Route("/health", admin.health),
            Route("/ping", admin.health),
            Route("/version", admin.version),
            Route("/load", admin.load),
            Route("/metrics", admin.metrics),
            Route("/server_info", admin.server_info),
            Route("/openapi.json", openapi),
            *(_admin_routes() if access.enable_admin_endpoints else ()),
            *console_routes(),
        ],
        middleware=[
            Middleware(RequestId),
            Middleware(Counted, metrics=server.metrics),
            *_cors(access),
            Middleware(Failures),
            Middleware(Access, keys=server.keys, config=access),
            *([] if server.tracer is None else [Middleware(TraceParent, tracer=server.tracer)]),
        ],
        exception_handlers={
            LeadlineError: on_error,
            HTTPException: on_error,
            ClientDisconnect: _nobody_listens,
        },
    )
    app.state.server = server
    keeps = server_config.chat.enable_responses_store
    app.state.responses = ResponseStore() if keeps else None
    return app


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
    return Response(status_code=NOTHING_SENT)


def starting_app() -> Starlette:
    """What answers while the model is being loaded: not ready (serving-api 14)."""
    return Starlette(
        routes=[
            Route("/version", admin.version),
            Route("/health", _not_ready_probe),
            Route("/ping", _not_ready_probe),
            Route("/{path:path}", _not_ready, methods=_METHODS),
        ],
        middleware=[Middleware(RequestId)],
        exception_handlers={LeadlineError: on_error, HTTPException: on_error},
    )


async def _not_ready_probe(_http: Request) -> Response:
    return Response(status_code=503)


async def _not_ready(_http: Request) -> Response:
    raise EngineOverloaded("the model is being loaded", code="not_ready", retry_after=5.0)
