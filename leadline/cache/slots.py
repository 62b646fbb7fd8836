"""Slots: the private state of running requests, one each, and of sessions between two turns."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from leadline.core.errors import OutOfSlots
from leadline.core.request import Request


class SlotAllocator:
    """Hands out slot ids ``1..num_slots - 1``; 0 belongs to padding rows.

    Nothing is cleared when a slot changes hands: a new owner reads no row that it has not written.
    """

    def __init__(self, num_slots: int) -> None:
        self.capacity = num_slots - 1
        self._free = list(range(num_slots - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Take a free slot.

        Raises:
            OutOfSlots: every slot belongs to a running request.
        """
        if not self._free:
            raise OutOfSlots(f"all {self.capacity} slots belong to running requests")
        return self._free.pop()

    def release(self, slot: int) -> None:
        assert 0 < slot <= self.capacity, f"slot {slot} does not exist"
        assert slot not in self._free, f"slot {slot} is released twice"
        self._free.append(slot)

    def check_integrity(self, owned: list[int]) -> None:
        """Assert that the free slots and ``owned``, one of each owner, make the whole."""
        every = sorted(self._free + owned)
        assert every == list(range(1, self.capacity + 1)), f"slots free or owned: {every}"


@dataclass(frozen=True, slots=True)
class HotSlot:
    """A finished request's slot and pages, kept for the next turn of its session.

    Attributes:
        tokens: the ids whose state the slot and pages hold; ``confirmed`` of them.
        extras: page index -> images in it, as in ``Request.page_extras``.
        floor_lo: first position that has window KV in the lower layers.
        floor_up: the same for the upper layers.
        committed: full pages among ``pages`` that the prefix index knows.
    """

    slot: int
    pages: array[int]
    tokens: array[int]
    extras: Mapping[int, bytes]
    floor_lo: int
    floor_up: int
    committed: int

    @property
    def confirmed(self) -> int:
        return len(self.tokens)

    def continues_in(self, request: Request) -> bool:
        """Whether the request's text is this one and at least one token more."""
        n = self.confirmed
        extras = {i: e for i, e in request.page_extras.items() if i < len(self.pages)}
        return (
            len(request.tokens) > n and request.tokens[:n] == self.tokens and extras == self.extras
        )


class HotSlots:
    """At most ``capacity`` hot slots, one a session and salt; the oldest goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: OrderedDict[tuple[str | None, str | None], HotSlot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[HotSlot]:
        return iter(self._slots.values())

    def put(self, request: Request, hot: HotSlot) -> None:
        """Keep it as the youngest; ``pop`` the session's older one and make room before."""
        assert len(self._slots) < self.capacity, f"all {self.capacity} hot slots are taken"
        self._slots[_session(request)] = hot

    def get(self, request: Request) -> HotSlot | None:
        """The hot slot of the request's session."""
        return self._slots.get(_session(request))

    def pop(self, request: Request) -> HotSlot | None:
        """Take the session's hot slot out."""
        return self._slots.pop(_session(request), None)

    def pop_oldest(self) -> HotSlot:
        return self._slots.popitem(last=False)[1]


def _session(request: Request) -> tuple[str | None, str | None]:
    """Salts separate tenants here too, whatever session keys they choose."""
    return request.session_key, request.cache_salt
