"""Responses kept in memory, for ``--enable-responses-store`` (serving-api 7)."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MAX_RESPONSES = 1000
_MAX_BYTES = 256 * 2**20
_TTL_SECONDS = 3600.0


@dataclass(slots=True)
class Stored:
    """A response and what it answered.

    Attributes:
        items: all input items, those of the responses before it included.
        owner: name of the key that may read it.
        num_bytes: of the body that it answered, which bounds what is kept.
        task: generates it in the background, or None.
    """

    response: dict[str, Any]
    items: list[Any]
    owner: str
    num_bytes: int
    task: asyncio.Task[None] | None = None
    expires: float = 0.0


class ResponseStore:
    """The last responses, for a while; ids are unguessable and belong to their key.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._num_bytes = 0

    def put(self, stored: Stored) -> None:
        """Keep a response, once; the oldest make room."""
        stored.expires = self._clock() + _TTL_SECONDS
        self._stored[stored.response["id"]] = stored
        self._num_bytes += stored.num_bytes
        while self._stored and self._has_too_many():
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, response_id: str, owner: str) -> Stored | None:
        """A response of ``owner``, or None when it is unknown or forgotten."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner or stored.expires <= self._clock():
            return None
        return stored

    def _has_too_many(self) -> bool:
        oldest = next(iter(self._stored.values()))
        return (
            len(self._stored) > _MAX_RESPONSES
            or self._num_bytes > _MAX_BYTES
            or oldest.expires <= self._clock()
        )
