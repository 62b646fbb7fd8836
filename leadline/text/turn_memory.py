"""Turns with tool calls as they were sampled, found again by the ids of their calls (C12)."""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from leadline.text.json_text import canonical
from leadline.text.spans import Ids


@dataclass(frozen=True, slots=True)
class _Turn:
    fingerprint: bytes
    token_ids: Ids


class TurnMemory:
    """The turns sampled last; encoding threads share it.

    A model's own spelling of a call (spaces, order, number formats) is rarely the canonical one.
    Rendering a returning turn as it was sampled keeps the cached prefix alive across tool turns.

    Args:
        max_turns: how many turns are kept, over all tenants.
        max_token_ids: how many ids these have together, 4 bytes each.
    """

    def __init__(self, *, max_turns: int = 100_000, max_token_ids: int = 2**26) -> None:
        self._max_turns, self._max_token_ids = max_turns, max_token_ids
        self._num_token_ids = 0
        self._turns: OrderedDict[tuple[str | None, str], _Turn] = OrderedDict()
        self._lock = threading.Lock()

    def put(
        self,
        tenant: str | None,
        content: str,
        calls: Iterable[tuple[str, str, str]],
        token_ids: Iterable[int],
    ) -> None:
        """Keep a turn.

        Args:
            tenant: nobody else finds it.
            content: its text before the calls.
            calls: id, name and JSON arguments of each, as they were sent to the client.
            token_ids: what it is to be rendered as.
        """
        calls = tuple(calls)
        key = (tenant, calls[0][0])
        turn = _Turn(_fingerprint(content, calls), array("I", token_ids))
        with self._lock:
            if (known := self._turns.pop(key, None)) is not None:
                self._num_token_ids -= len(known.token_ids)
            self._turns[key] = turn
            self._num_token_ids += len(turn.token_ids)
            while len(self._turns) > self._max_turns or self._num_token_ids > self._max_token_ids:
                _, oldest = self._turns.popitem(last=False)
                self._num_token_ids -= len(oldest.token_ids)

    def get(
        self, tenant: str | None, content: str, calls: Iterable[tuple[str, str, str]]
    ) -> Ids | None:
        """Ids of a turn that comes back unchanged: ids, names, content and what arguments mean."""
        calls = tuple(calls)
        key = (tenant, calls[0][0])
        with self._lock:
            turn = self._turns.get(key)
            if turn is None:
                return None
            self._turns.move_to_end(key)
        return turn.token_ids if turn.fingerprint == _fingerprint(content, calls) else None


def _fingerprint(content: str, calls: tuple[tuple[str, str, str], ...]) -> bytes:
    plain = [content, *([id, name, canonical(arguments)] for id, name, arguments in calls)]
    return hashlib.sha256(json.dumps(plain).encode()).digest()
