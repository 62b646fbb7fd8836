"""A stage's clock: every schedule follows it, since a machine may be had for minutes only."""

from __future__ import annotations

import time
from collections.abc import Callable

from leadline.tools.train_tiny.recipes import Stage

# What ending costs, before the first evaluation shows it: seconds, or a share of a short stage.
_UNKNOWN_PAUSE = 8.0
_UNKNOWN_SHARE = 0.04
# Steps that are under way on a GPU when the host decides to stop.
_DRAIN_SECONDS = 2.0


class Clock:
    """Tells how much of a stage is gone, keeping time back for its end.

    Args:
        stage: its seconds and steps.
        started: when it began, by ``now``.
        now: seconds, monotonic.
    """

    def __init__(
        self, stage: Stage, started: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stage, self._started, self._now = stage, started, now
        self._pause = min(_UNKNOWN_PAUSE, _UNKNOWN_SHARE * stage.seconds)

    @property
    def seconds(self) -> float:
        """Gone since the start."""
        return self._now() - self._started

    def progress(self, step: int) -> float:
        """Share of the stage that is gone before step ``step``; over from 1 on."""
        usable = max(1e-9, self._stage.seconds - 2 * self._pause - _DRAIN_SECONDS)
        return max(self.seconds / usable, step / self._stage.max_steps)

    def paused(self, seconds: float) -> None:
        """An evaluation with its checkpoint took so long; the last one will too."""
        self._pause = seconds
