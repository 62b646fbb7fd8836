"""Slots: the private state of running requests, one each."""

from __future__ import annotations

from leadline.core.errors import OutOfSlots


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
        """Assert that the free slots and ``owned``, one of each live request, make the whole."""
        every = sorted(self._free + owned)
        assert every == list(range(1, self.capacity + 1)), f"slots free or owned: {every}"
