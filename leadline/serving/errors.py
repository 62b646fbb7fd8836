"""Errors -> what a client may know of them (serving-api 11)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from starlette.exceptions import HTTPException

from leadline.core.errors import (
    BadRequest,
    EngineDead,
    EngineOverloaded,
    LeadlineError,
    NotSupported,
    RequestTimeout,
)
from leadline.serving.rate_limit import RateLimited

logger = logging.getLogger(__name__)


# Statuses of mistakes by their code, where it is not 400.
_STATUS = {"model_not_found": 404, "response_not_found": 404, "request_too_large": 413}


class GenerationFailed(LeadlineError):
    """The engine ended one request with an error; others go on."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as a client may see it; the dialect gives it its form (serving-api 11).

    Attributes:
        kind: OpenAI's ``type``.
        retry_after: seconds, of 429 and 503.
    """

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None


# Type and code by status, of what HTTP itself has a status for.
_HTTP_ERRORS = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("not_found_error", None),
    408: ("timeout_error", None),
}


def describe(error: BaseException) -> Failure:
    """What a client may know of an error.

    Messages of errors that are not ours stay in the log: they could hold text of a request.
    """
    match error:
        case BadRequest():
            status = _STATUS.get(error.code, 400)
            kind = "not_found_error" if status == 404 else "invalid_request_error"
            return Failure(status, kind, str(error), error.param, error.code)
        case NotSupported():
            return Failure(400, "invalid_request_error", str(error), code="not_supported")
        case EngineOverloaded():
            return Failure(
                503,
                "overloaded_error",
                str(error),
                code=error.code,
                retry_after=error.retry_after,
            )
        case RateLimited():
            return Failure(
                429,
                "rate_limit_error",
                str(error),
                code="rate_limit_exceeded",
                retry_after=error.retry_after,
            )
        case RequestTimeout():
            return Failure(504, "timeout_error", str(error), code="request_timeout")
        case EngineDead() | GenerationFailed():
            return Failure(500, "server_error", str(error), code="internal_error")
        case HTTPException():
            kind, code = _HTTP_ERRORS.get(error.status_code, ("invalid_request_error", None))
            return Failure(error.status_code, kind, error.detail, code=code)
    logger.error("unexpected error", exc_info=error)
    return Failure(
        500, "server_error", "internal error; the server's log has more", code="internal_error"
    )
