"""Request bodies: read within a limit, decoded strictly, errors that name the field."""

from __future__ import annotations

import logging
import re
from typing import TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from leadline.core.errors import BadRequest

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

_LONE_SURROGATE = re.compile(
    rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\[^u])"  # a pair, an escape
    rb"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)


async def read_body(http: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        BadRequest: it is larger than ``max_bytes`` (C52).
        HTTPException: 415 for another content type or a compressed body.
    """
    content_type = http.headers.get("content-type", "application/json")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, f"Content-Type is {content_type!r}; send application/json")
    encoding = http.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise HTTPException(415, f"Content-Encoding is {encoding!r}; send the body uncompressed")
    length = http.headers.get("content-length", "0")
    body = bytearray()
    if not length.isdecimal() or int(length) <= max_bytes:
        async for chunk in http.stream():
            body += chunk
            if len(body) > max_bytes:
                break
        else:
            return bytes(body)
    raise BadRequest(f"the request body is larger than {max_bytes} bytes", code="request_too_large")


def decode_body(raw: bytes, kind: type[T]) -> T:
    """Decode JSON into a ``msgspec`` struct; unknown fields are ignored (C26).

    Raises:
        BadRequest: malformed JSON, or a field of the wrong type with its path as ``param``.
    """
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    # Agents cut emoji in half: half a surrogate pair is served as U+FFFD (C51).
    if b"\\ud" in raw or b"\\uD" in raw:
        raw = _LONE_SURROGATE.sub(_replace_lone_surrogate, raw)
    try:
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply", code="invalid_json") from error
    if logger.isEnabledFor(logging.DEBUG):
        sent = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        if unknown := sent.keys() - set(kind.__struct_encode_fields__):
            logger.debug("ignored fields: %s", ", ".join(sorted(unknown)))
    return body


def _replace_lone_surrogate(match: re.Match[bytes]) -> bytes:
    found = match[0]
    return b"\\ufffd" if len(found) == 6 else found


def _invalid_field(message: str) -> BadRequest:
    """Turn "Expected `int`, got `str` - at `$.max_tokens`" into an error with its ``param``."""
    text, _, path = message.partition(" - at `$")
    param = path.rstrip("`").removeprefix(".")
    if missing := re.search(r"missing required field `(\w+)`", text):
        param = f"{param}.{missing[1]}" if param else missing[1]
    if text == "Number out of range" or not param:
        return BadRequest(f"the body is not valid: {message}", code="invalid_json")
    return BadRequest(f"{param}: {text}", param=param)
