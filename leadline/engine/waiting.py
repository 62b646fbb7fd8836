"""Who waits, and in which order they may come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from leadline.core.request import Request


class WaitingQueue:
    """Waiting requests by class, fairness and age (cache-and-scheduling 5.4).

    The order is made when it is asked for: classes improve while requests wait, and a session's
    turn depends on what else of it runs.

    Args:
        aging_seconds: waiting this long improves the class by one; None never does.
    """

    def __init__(self, aging_seconds: float | None) -> None:
        self._aging_seconds = aging_seconds
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def in_order(self, now: float, running: Counter[str]) -> list[Request]:
        """Next one first: class, preempted ones, sessions with less running, then arrival.

        Args:
            now: seconds on the clock that arrivals were taken from.
            running: running requests of each session.
        """

        def place(request: Request) -> tuple[int, bool, int, float]:
            session = running[request.session_key] if request.session_key else 0
            return self._class(request, now), not request.num_preemptions, session, request.arrival

        return sorted(self._requests.values(), key=place)

    def _class(self, request: Request, now: float) -> int:
        if self._aging_seconds is None:
            return request.priority
        return request.priority - int((now - request.arrival) / self._aging_seconds)
