"""Errors -> OpenAI error bodies and HTTP statuses (serving-api 11)."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from leadline.core.errors import (
    BadRequest,
    EngineDead,
    EngineOverloaded,
    LeadlineError,
    NotSupported,
)

logger = logging.getLogger(__name__)


class GenerationFailed(LeadlineError):
    """The engine ended one request with an error; others go on."""


def describe(error: BaseException) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error.

    Messages of errors that are not ours stay in the log: they could hold text of a request.
    """
    match error:
        case BadRequest():
            status = {"model_not_found": 404, "request_too_large": 413}.get(error.code, 400)
            kind = "not_found_error" if status == 404 else "invalid_request_error"
            return status, _body(str(error), kind, param=error.param, code=error.code)
        case NotSupported():
            return 400, _body(str(error), "invalid_request_error", code="not_supported")
        case EngineOverloaded():
            return 503, _body(str(error), "overloaded_error", code="server_overloaded")
        case EngineDead() | GenerationFailed():
            return 500, _body(str(error), "server_error", code="internal_error")
        case HTTPException():
            kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
            return error.status_code, _body(error.detail, kind)
    logger.error("unexpected error", exc_info=error)
    return 500, _body("internal error; the server's log has more", "server_error", "internal_error")


def error_response(error: BaseException) -> Response:
    """The answer to a request that failed before anything was sent."""
    status, body = describe(error)
    headers = dict(getattr(error, "headers", None) or {})
    if status == 503:
        headers |= {"Retry-After": "1", "retry-after-ms": "1000"}
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


async def on_error(http: Request, error: Exception) -> Response:
    """Starlette's exception handler for every type in ``describe``."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        detail = (
            f"{http.method} {http.url.path}: "
            + {
                404: "there is no such path",
                405: "this method is not allowed here",
            }[error.status_code]
        )
        if http.url.path.startswith("/v1/v1/"):
            detail += "; the base URL already ends in /v1, configure the client with one /v1"
        error = HTTPException(error.status_code, detail, error.headers)
    return error_response(error)


def _body(
    message: str, kind: str, code: str | None = None, *, param: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
