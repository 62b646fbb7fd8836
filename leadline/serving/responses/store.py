"""Responses kept in memory, for ``--enable-responses-store`` (serving-api 7)."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MAX_RESPONSES = 1000
_TTL_SECONDS = 3600.0


@dataclass(slots=True)
class Stored:
    """A response and what it answered.

    Attributes:
        items: all input items, those of the responses before it included.
        owner: name of the key that may read it.
        task: generates it in the background, or None.
    """

    response: dict[str, Any]
    items: list[Any]
    owner: str
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

    def put(self, stored: Stored) -> None:
        """Keep a response; the oldest makes room."""
        response_id = stored.response["id"]
        stored.expires = self._clock() + _TTL_SECONDS
        self._stored[response_id] = stored
        self._stored.move_to_end(response_id)
        while len(self._stored) > _MAX_RESPONSES or self._is_first_expired():
            self._stored.popitem(last=False)

    def get(self, response_id: str, owner: str) -> Stored | None:
        """A response of ``owner``, or None when it is unknown or forgotten."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner or stored.expires <= self._clock():
            return None
        return stored

    def _is_first_expired(self) -> bool:
        first = next(iter(self._stored.values()))
        return first.expires <= self._clock()
