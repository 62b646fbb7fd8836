"""Graphs that a profile can go around."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from leadline.engine.forwards import Capture, CudaCapture, Replay


class GraphBypass:
    """Captures graphs that can also run as the calls which they were captured from.

    Attributes:
        op_by_op: whether they do.
        has_graphs: whether any was captured.
    """

    def __init__(self, make: Callable[[], Capture] = CudaCapture) -> None:
        self.op_by_op = self.has_graphs = False
        self._make = make
        self._capture: Capture | None = None

    def __call__(self, run: Callable[[], None]) -> Replay:
        """See ``Capture``."""
        if self._capture is None:  # not before there is a graph: a CPU has none
            self._capture = self._make()
        self.has_graphs = True
        replay = self._capture(run)
        return lambda: run() if self.op_by_op else replay()

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """What was captured runs op by op inside."""
        self.op_by_op = True
        try:
            yield
        finally:
            self.op_by_op = False
