"""Request bodies: read within a limit, decoded strictly, errors that name the field."""

from __future__ import annotations

import asyncio
import gzip
import io
import logging
import re
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, BinaryIO, TypeVar

import msgspec
import zstandard
from starlette.exceptions import HTTPException
from starlette.requests import Request

from leadline.core.errors import BadRequest, EngineOverloaded

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

# A client that sends nothing of its body for so long is given up.
_IDLE_SECONDS = 30.0
_CHUNK_BYTES = 64 * 1024
_ZSTD_WINDOW_BYTES = 8 * 2**20  # what HTTP allows, RFC 9659
_DECOMPRESSORS: dict[str, Callable[[BinaryIO], Any]] = {
    "gzip": lambda raw: gzip.GzipFile(fileobj=raw),
    "zstd": lambda raw: zstandard.ZstdDecompressor(
        max_window_size=_ZSTD_WINDOW_BYTES
    ).stream_reader(raw, read_across_frames=True),
}

_LONE_SURROGATE = re.compile(
    rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\[^u])"  # a pair, an escape
    rb"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)


class BodyReader:
    """Reads request bodies; those that are half here share a bound, for anybody may send halves.

    Args:
        max_bytes: of one body.
        max_held_bytes: of all bodies that are being read.

    Attributes:
        num_held_bytes: what has come of them.
    """

    def __init__(self, max_bytes: int, max_held_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self.num_held_bytes = 0

    async def read(self, http: Request) -> bytes:
        """The whole body, decompressed.

        Raises:
            BadRequest: it is larger than allowed, as sent or decompressed (C52).
            EngineOverloaded: too much is being read beside it.
            HTTPException: 415 for another content type or coding, 408 when nothing more comes.
        """
        coding = _coding(http)
        raw = await self._read(http)
        if coding == "identity":
            return raw
        # In a thread: a few kilobytes can hold all that is allowed (C53).
        return await asyncio.to_thread(_decompress, raw, coding, self._max_bytes)

    async def _read(self, http: Request) -> bytes:
        length = http.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise _too_large(self._max_bytes)
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            async with aclosing(http.stream()) as stream:
                while chunk := await _next_chunk(stream):
                    num_bytes += len(chunk)
                    self.num_held_bytes += len(chunk)
                    if num_bytes > self._max_bytes:
                        raise _too_large(self._max_bytes)
                    if self.num_held_bytes > self._max_held_bytes:
                        raise EngineOverloaded("too many bodies are being read; try again later")
                    chunks.append(chunk)
            return b"".join(chunks)
        finally:
            self.num_held_bytes -= num_bytes


def _coding(http: Request) -> str:
    """The content coding of a JSON body."""
    content_type = http.headers.get("content-type", "application/json")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, f"Content-Type is {content_type!r}; send application/json")
    coding = http.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", *_DECOMPRESSORS):
        raise HTTPException(
            415, f"Content-Encoding is {coding!r}; send {', '.join(_DECOMPRESSORS)} or none"
        )
    return coding


async def _next_chunk(stream: AsyncIterator[bytes]) -> bytes:
    """Empty at the end."""
    try:
        return await asyncio.wait_for(anext(stream, b""), _IDLE_SECONDS)
    except TimeoutError:
        raise HTTPException(
            408,
            f"nothing more of the body came for {_IDLE_SECONDS:g} seconds",
            {"Connection": "close"},  # what comes late is no new request
        ) from None


def _decompress(raw: bytes, coding: str, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        with _DECOMPRESSORS[coding](io.BytesIO(raw)) as reader:
            while chunk := reader.read(_CHUNK_BYTES):
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes)
                chunks.append(chunk)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise BadRequest(f"the body is not valid {coding}: {error}", code="invalid_json") from error
    return b"".join(chunks)


def _too_large(max_bytes: int) -> BadRequest:
    return BadRequest(
        f"the request body is larger than {max_bytes} bytes", code="request_too_large"
    )


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
            logger.debug("ignored fields: %s", ", ".join(map(repr, sorted(unknown))))
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
        return BadRequest(
            f"the body is not valid: {message}", param=param or None, code="invalid_json"
        )
    return BadRequest(f"{param}: {text}", param=param)
