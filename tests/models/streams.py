"""Streams of a device that is not there: every access to memory is proven to be ordered.

Work is done at once, as a CPU does it. What is kept is which stream each op belongs to, and which
ops of other streams it comes after by events. An op that reads what another stream writes, or
writes what another one reads, without an event between them, is a race.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = Counter[str]
"""How many ops of each stream come before."""


class Race(AssertionError):
    """Two ops on one memory, in no order."""


class FakeStream:
    """As ``torch.cuda.Stream``, as far as models use it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = Clock()

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Clock:
        return self.clock.copy()

    def wait_event(self, event: Clock) -> None:
        self.clock |= event


class FakeDevice:
    """As ``torch.cuda``; ``torch.get_device_module`` is to return it."""

    def __init__(self) -> None:
        self.streams = [FakeStream("main")]
        self._current = self.streams[0]

    def Stream(self, priority: int) -> FakeStream:
        self.streams.append(FakeStream(f"side {len(self.streams)}"))
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def ops_of(self, name: str) -> int:
        """How many ops a stream has run."""
        return sum(stream.clock[name] for stream in self.streams if stream.name == name)


class Watched(TorchDispatchMode):
    """Raises ``Race`` at the op that completes one."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        # By address of memory: the last write, and the reads since, as (stream, number of op).
        self._written: dict[int, tuple[str, int]] = {}
        self._read: dict[int, dict[str, int]] = {}
        self._kept: list[Tensor] = []  # or an address would come to name other memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream, kwargs = self._device.current_stream(), kwargs or {}
        if func.is_view:  # which looks at no memory
            return func(*args, **kwargs)
        now = stream.clock[stream.name] + 1
        schema = func._schema.arguments
        targets = [
            value
            for argument, value in [*zip(schema, args, strict=False)]
            + [(argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs]
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        changed = {address_of(tensor) for tensor in tensors_in(targets)}
        inputs = {address_of(tensor) for tensor in tensors_in((args, kwargs))}
        for address in inputs:
            before = [self._written.get(address)]
            if address in changed:
                before += self._read.get(address, {}).items()
            for name, number in filter(None, before):
                if stream.clock[name] < number:
                    raise Race(f"{func} on {stream.name} does not come after an op of {name}")
        result = func(*args, **kwargs)
        stream.clock[stream.name] = now
        made = tensors_in(result)
        self._kept += made + tensors_in((args, kwargs))
        for address in {address_of(tensor) for tensor in made} - inputs | changed:
            self._written[address] = stream.name, now
            self._read[address] = {}
        for address in inputs - changed:
            self._read.setdefault(address, {})[stream.name] = now
        return result


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
