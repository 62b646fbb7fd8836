"""Whether the engine lives and moves, without waiting for a long step (serving-api 14)."""

from __future__ import annotations

import asyncio

from leadline.core.client import EngineClient, EngineStats
from leadline.core.errors import EngineDead

# Probes wait so long for an engine in the middle of a step; after that the last news will do.
_PATIENCE_SECONDS = 0.5


class Pulse:
    """The newest statistics of an engine.

    Args:
        client: the engine.
        watchdog_seconds: without a step while requests run, or without an answer, after which
            the engine counts as hung.
    """

    def __init__(self, client: EngineClient, watchdog_seconds: float) -> None:
        self._client = client
        self._watchdog_seconds = watchdog_seconds
        self._question: asyncio.Task[EngineStats] | None = None
        self._asked_at = 0.0
        self._last: EngineStats | None = None

    async def stats(self) -> EngineStats | None:
        """The engine's statistics; the last known while it works on a long step, None before any.

        Raises:
            EngineDead: it has ended.
        """
        loop = asyncio.get_running_loop()
        question = self._question
        if question is None:
            self._asked_at = loop.time()
            question = self._question = asyncio.ensure_future(self._client.stats())
        await asyncio.wait({question}, timeout=_PATIENCE_SECONDS)
        if question.done():
            if self._question is question:
                self._question = None
            self._last = question.result()
        return self._last

    async def check(self) -> None:
        """Return when the engine is well.

        Raises:
            EngineDead: it has ended, or hangs.
        """
        stats = await self.stats()
        stalled = stats.stalled_seconds if stats else 0.0
        if self._question is not None:
            stalled = max(stalled, asyncio.get_running_loop().time() - self._asked_at)
        if stalled > self._watchdog_seconds:
            raise EngineDead(f"the engine has made no progress for {stalled:.0f} seconds")
