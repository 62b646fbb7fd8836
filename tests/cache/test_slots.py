from __future__ import annotations

import pytest

from leadline.cache.slots import SlotAllocator
from leadline.core.errors import OutOfSlots


def test_every_slot_but_the_padding_slot_is_handed_out_once() -> None:
    slots = SlotAllocator(num_slots=4)
    taken = [slots.allocate() for _ in range(3)]
    assert sorted(taken) == [1, 2, 3]
    with pytest.raises(OutOfSlots, match="all 3 slots"):
        slots.allocate()
    slots.release(taken[1])
    assert slots.allocate() == taken[1]
    slots.check_integrity(taken)


@pytest.mark.parametrize("slot", [0, 1, 4], ids=["padding", "free", "unknown"])
def test_only_an_owned_slot_can_be_released(slot: int) -> None:
    with pytest.raises(AssertionError, match=f"slot {slot}"):
        SlotAllocator(num_slots=4).release(slot)


def test_two_requests_in_one_slot_are_found() -> None:
    slots = SlotAllocator(num_slots=4)
    slot = slots.allocate()
    with pytest.raises(AssertionError, match="slots free or owned"):
        slots.check_integrity([slot, slot])
