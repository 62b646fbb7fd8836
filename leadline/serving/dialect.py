"""How the APIs differ in what is not an answer: errors, keep-alive and ends of streams."""

from __future__ import annotations

import math
from typing import Any, Protocol

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from leadline.serving.errors import Failure, describe
from leadline.serving.events import event


class Dialect(Protocol):
    """The frame around the answers of one API.

    Attributes:
        keep_alive: what a silent stream sends; clients ignore it.
        end: what closes a stream, after an error too.
    """

    keep_alive: bytes
    end: bytes

    def error_body(self, failure: Failure, request_id: str) -> dict[str, Any]:
        """The JSON body of an error."""
        ...

    def error_event(self, failure: Failure, request_id: str) -> bytes:
        """The event that tells of an error once a stream runs."""
        ...


class _OpenAI:
    keep_alive = b": keep-alive\n\n"
    end = b"data: [DONE]\n\n"

    def error_body(self, failure: Failure, _request_id: str) -> dict[str, Any]:
        return {
            "error": {
                "message": failure.message,
                "type": failure.kind,
                "param": failure.param,
                "code": failure.code,
            }
        }

    def error_event(self, failure: Failure, request_id: str) -> bytes:
        return event(self.error_body(failure, request_id))


class _Responses(_OpenAI):
    end = b""

    def error_event(self, failure: Failure, _request_id: str) -> bytes:
        payload = {
            "type": "error",
            "code": failure.code,
            "message": failure.message,
            "param": failure.param,
        }
        return event(payload, name="error")


# serving-api 8: Anthropic's names by status, where they are not OpenAI's.
_ANTHROPIC_KINDS = {
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _Anthropic:
    keep_alive = event({"type": "ping"}, name="ping")
    end = b""

    def error_body(self, failure: Failure, request_id: str) -> dict[str, Any]:
        kind = _ANTHROPIC_KINDS.get(failure.status, failure.kind)
        return {
            "type": "error",
            "error": {"type": kind, "message": failure.message},
            "request_id": request_id,
        }

    def error_event(self, failure: Failure, request_id: str) -> bytes:
        return event(self.error_body(failure, request_id), name="error")


OPENAI: Dialect = _OpenAI()
RESPONSES: Dialect = _Responses()
ANTHROPIC: Dialect = _Anthropic()


def dialect_of(path: str) -> Dialect:
    """The dialect that clients of a path expect, errors of unknown paths included."""
    if "/messages" in path or path.startswith("/anthropic/"):
        return ANTHROPIC
    return RESPONSES if "/responses" in path else OPENAI


def error_response(error: BaseException, scope: Scope) -> Response:
    """The answer to a request that failed before anything was sent."""
    failure = describe(error)
    scope["state"]["failure"] = failure.code  # for the metrics
    headers = dict(getattr(error, "headers", None) or {})
    if failure.retry_after is not None:
        headers |= {
            "Retry-After": str(max(1, math.ceil(failure.retry_after))),
            "retry-after-ms": str(math.ceil(failure.retry_after * 1000)),
        }
    body = dialect_of(scope["path"]).error_body(failure, scope["state"]["request_id"])
    return Response(
        msgspec.json.encode(body), failure.status, headers, media_type="application/json"
    )


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
    return error_response(error, http.scope)
