"""``GET /openapi.json``: the API's description, from its routes and the types of its bodies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from leadline.core.version import __version__
from leadline.serving import admin
from leadline.serving.anthropic.messages import count_tokens, messages
from leadline.serving.anthropic.schema import MessagesRequest
from leadline.serving.openai.answers import ChatCompletion, Completion
from leadline.serving.openai.chat import chat_completions
from leadline.serving.openai.completions import completions
from leadline.serving.openai.schema import ChatRequest, CompletionRequest
from leadline.serving.openai.tokenize import (
    DetokenizeRequest,
    Text,
    TokenizeRequest,
    Tokens,
    detokenize,
    tokenize,
)
from leadline.serving.responses.endpoints import create_response
from leadline.serving.responses.schema import ResponsesRequest

_JSON, _EVENTS = "application/json", "text/event-stream"


class _Bodies(NamedTuple):
    """What goes in and comes out of an endpoint.

    Attributes:
        request: the body's type; None without a body.
        answer: the same of a JSON answer; None where no type describes it.
        media_types: of the answer; none when it has no body.
    """

    request: type | None = None
    answer: type | None = None
    media_types: tuple[str, ...] = (_JSON,)


# Endpoints that are not here take no body and answer JSON.
_BODIES: Mapping[Any, _Bodies] = {
    chat_completions: _Bodies(ChatRequest, ChatCompletion, (_JSON, _EVENTS)),
    completions: _Bodies(CompletionRequest, Completion, (_JSON, _EVENTS)),
    create_response: _Bodies(ResponsesRequest, None, (_JSON, _EVENTS)),
    messages: _Bodies(MessagesRequest, None, (_JSON, _EVENTS)),
    count_tokens: _Bodies(MessagesRequest),
    tokenize: _Bodies(TokenizeRequest, Tokens),
    detokenize: _Bodies(DetokenizeRequest, Text),
    admin.health: _Bodies(media_types=()),
    admin.metrics: _Bodies(media_types=("text/plain",)),
}
_TYPES = [kind for bodies in _BODIES.values() for kind in (bodies.request, bodies.answer) if kind]
_REFERENCES, _SCHEMAS = msgspec.json.schema_components(
    _TYPES, ref_template="#/components/schemas/{name}"
)
_SCHEMA = dict(zip(_TYPES, _REFERENCES, strict=True))


async def openapi(http: Request) -> Response:
    """The description of this server, with a key like everything that is no probe."""
    return JSONResponse(description(http.app.routes, root_path=http.scope.get("root_path", "")))


def description(routes: Iterable[BaseRoute], *, root_path: str = "") -> dict[str, Any]:
    """OpenAPI 3.1 of an application.

    Args:
        routes: of the application; those without ``include_in_schema`` are left out.
        root_path: where a proxy shows it.
    """
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            for method in sorted((route.methods or set()) - {"HEAD"}):
                paths.setdefault(route.path_format, {})[method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Leadline", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    bodies = _BODIES.get(route.endpoint, _Bodies())
    answers: dict[str, Any] = {"200": {"description": "the answer"}}
    if bodies.media_types:
        answers["200"]["content"] = {kind: {} for kind in bodies.media_types}
    if bodies.answer is not None:
        answers["200"]["content"][_JSON] = {"schema": _SCHEMA[bodies.answer]}
    operation: dict[str, Any] = {
        "summary": (route.endpoint.__doc__ or "").partition("\n")[0],
        "responses": {**answers, "default": {"description": "an error"}},
    }
    if route.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    if bodies.request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {_JSON: {"schema": _SCHEMA[bodies.request]}},
        }
    return operation
