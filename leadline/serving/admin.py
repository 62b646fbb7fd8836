"""Health, version, models, metrics, and what the administrator may do (serving-api 4, 14)."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from leadline.config.server import shown
from leadline.core.client import EngineStats
from leadline.core.errors import EngineDead
from leadline.core.version import __version__
from leadline.serving.context import Server, server_of


async def health(http: Request) -> Response:
    """200 when the engine is well and the server takes requests, else 503; no body."""
    server = server_of(http)
    is_well = False
    if not server.admission.is_draining:  # load balancers need not wait for a step to hear that
        with contextlib.suppress(EngineDead):
            stats = await server.stats()
            is_well = stats.stalled_seconds <= server.config.watchdog_timeout
    return Response(status_code=200 if is_well else 503)


async def version(_http: Request) -> Response:
    """The version of this program."""
    return JSONResponse({"version": __version__})


async def models(http: Request) -> Response:
    """Every served name."""
    server = server_of(http)
    entries = [_model(server, name) for name in server.model_names]
    return JSONResponse({"object": "list", "data": entries})


async def model(http: Request) -> Response:
    """One served name, which may hold slashes; all of them where only a slash follows."""
    name, server = http.path_params["model"], server_of(http)
    return JSONResponse(_model(server, server.resolve_model(name))) if name else await models(http)


async def load(http: Request) -> Response:
    """How many generating requests are open."""
    return JSONResponse({"server_load": server_of(http).admission.num_open})


async def metrics(http: Request) -> Response:
    """Prometheus text; without the engine's part when it does not answer."""
    server = server_of(http)
    stats: EngineStats | None = None
    with contextlib.suppress(EngineDead):  # what this process counted is still true
        stats = await server.stats()
    return Response(server.metrics.exposition(stats), media_type="text/plain; version=0.0.4")


async def server_info(http: Request) -> Response:
    """The settings, without secrets, and what they came to."""
    server = server_of(http)
    stats = await server.stats()
    return JSONResponse(
        {
            "version": __version__,
            "worker_id": server.worker_id,
            "model": asdict(server.model),
            "cache": {
                "num_pages": stats.num_pages,
                "page_size": stats.page_size,
                "bytes_per_token": stats.page_bytes / stats.page_size,
                "num_slots": stats.num_slots,
                "slot_bytes": stats.slot_bytes,
            },
            "settings": {**server.engine_settings, "server": shown(server.config)},
        }
    )


async def reset_prefix_cache(http: Request) -> Response:
    """Forget cached prefixes; false when running requests kept some."""
    return JSONResponse({"success": await server_of(http).client.reset_prefix_cache()})


async def pause(http: Request) -> Response:
    """Stop scheduling; requests wait."""
    await server_of(http).client.pause(True)
    return JSONResponse({"is_paused": True})


async def resume(http: Request) -> Response:
    """Schedule again."""
    await server_of(http).client.pause(False)
    return JSONResponse({"is_paused": False})


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
