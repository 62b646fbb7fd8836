"""Work beside the current stream: forked where its inputs are, joined where its result is wanted.

A graph that captures a step takes side streams in at a fork and gives them up at the join: they
become branches of it. On a CPU streams do nothing, and work is done where it is forked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from leadline.config.checks import some_of

T = TypeVar("T")

# Kernels of more rows fill a GPU by themselves: what ran beside them would only take turns with
# them (kernels.md 1.3). Whole products and selections come to that sooner than coefficients do.
FEW_ROWS = 64
FEWER_ROWS = 16


@dataclass(frozen=True, slots=True)
class Fork(Generic[T]):
    """Work that has been launched; made by ``SideStream.fork``.

    Attributes:
        value: its result. Only what is forked to the same side stream may use it before ``join``.
        work: what was launched. It holds the inputs, whose memory would else be free for the
            current stream while the side still reads it.
        end: the event at its end; None where it ran on the current stream.
        device: torch's module of the device.
    """

    value: T
    work: Callable[[], T] | None = None
    end: Any = None
    device: Any = None

    def join(self) -> T:
        """The result, for whatever the current stream is given from now on.

        The device waits, and the host does not.
        """
        if self.end is not None:
            self.device.current_stream().wait_event(self.end)
        return self.value


class SideStream:
    """A second queue of the device. Its work is short, and waits for the current stream first.

    So memory of what was made here is used again only behind a fork, which waits for whatever the
    current stream reads by then: no tensor needs ``record_stream``, which graphs would not follow.
    Kernels that may come up early read nothing until all launches in front of them have ended,
    those that a fork or join waits for among them.

    Args:
        device: of the tensors.
        enabled: otherwise all work is done where it is forked.
        max_rows: the same for steps of more rows; None is no bound.
        priority: below 0, waiting programs go before those of other streams.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        enabled: bool = True,
        max_rows: int | None = None,
        priority: int = 0,
    ) -> None:
        self._device = torch.get_device_module(device)
        self._stream = self._device.Stream(priority=priority) if enabled else None
        self._max_rows = max_rows

    def fork(self, work: Callable[[], T], num_rows: int = 0) -> Fork[T]:
        """Launch work on the side, behind what the current stream has been given so far.

        Args:
            work: launches all of it; its inputs are its own (``functools.partial``).
            num_rows: of the step.
        """
        if self._stream is None or (self._max_rows is not None and num_rows > self._max_rows):
            return Fork(work())
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            value = work()
            end = self._stream.record_event()
        return Fork(value, work, end, self._device)


SideStreams = Mapping[str, SideStream]
"""By part of a model, where its work is forked."""


def make_side_streams(
    wanted: str, device: torch.device, sharing: Mapping[tuple[str, ...], int]
) -> SideStreams:
    """Sides for the parts that a setting wants; the others' work is done where it is forked.

    Any choice is safe, as parts meet on the current stream only: each fork waits for it, and
    each part is joined before another one reads what it made.

    Args:
        wanted: parts, as ``config.checks.some_of`` reads them.
        device: of the model.
        sharing: all parts of the model, and the rows of a step up to which they run beside it;
            those of one tuple take turns on one stream.

    Raises:
        ConfigError: the model has no such part.
    """
    chosen = some_of("side_streams", wanted, [part for parts in sharing for part in parts])
    inline, sides = SideStream(device, enabled=False), dict[str, SideStream]()
    for parts, max_rows in sharing.items():
        side = SideStream(device, enabled=not chosen.isdisjoint(parts), max_rows=max_rows)
        sides |= {part: side if part in chosen else inline for part in parts}
    return sides
