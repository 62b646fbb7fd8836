"""Health, version, model list and metrics (serving-api 4, 14)."""

from __future__ import annotations

import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from leadline.core.client import EngineStats
from leadline.core.errors import EngineDead
from leadline.core.version import __version__
from leadline.serving.context import Server, server_of


async def health(http: Request) -> Response:
    """200 when the engine answers, else 503; no body."""
    try:
        await server_of(http).client.health()
    except EngineDead:
        return Response(status_code=503)
    return Response()


async def version(_http: Request) -> Response:
    """The version of this program."""
    return JSONResponse({"version": __version__})


async def models(http: Request) -> Response:
    """Every served name."""
    server = server_of(http)
    entries = [_model(server, name) for name in server.model_names]
    return JSONResponse({"object": "list", "data": entries})


async def model(http: Request) -> Response:
    """One served name, which may hold slashes."""
    server = server_of(http)
    return JSONResponse(_model(server, server.resolve_model(http.path_params["model"])))


async def metrics(http: Request) -> Response:
    """Prometheus text; without the engine's part when it does not answer."""
    server = server_of(http)
    stats: EngineStats | None = None
    with contextlib.suppress(EngineDead):  # what this process counted is still true
        stats = await server.client.stats()
    return Response(server.metrics.exposition(stats), media_type="text/plain; version=0.0.4")


def _model(server: Server, name: str) -> dict[str, Any]:
    limit = server.model.max_model_len
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "leadline",
        "root": server.model.root,
        "parent": None,
        "max_model_len": limit,
        "context_length": limit,
        "max_completion_tokens": limit - 1,
        "capabilities": {"vision": False, "tools": True, "reasoning": True},
    }
