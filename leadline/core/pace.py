"""How fast something has gone lately, to tell how long more of it will take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

NUM_EVENTS = 64
MIN_SECONDS, MAX_SECONDS = 1.0, 60.0


class Pace:
    """Amounts by the time at which they were done; the latest ``NUM_EVENTS`` count.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: deque[tuple[float, int]] = deque(maxlen=NUM_EVENTS)

    def count(self, amount: int = 1) -> None:
        """Say that this much was done just now."""
        self._events.append((self._clock(), amount))

    def seconds_for(self, amount: int) -> float:
        """Seconds that so much will take, 1 to 60; 1 while nothing is known."""
        done = sum(amount for _, amount in self._events)
        if not done:
            return MIN_SECONDS
        seconds = (self._clock() - self._events[0][0]) * amount / done
        return min(max(seconds, MIN_SECONDS), MAX_SECONDS)
