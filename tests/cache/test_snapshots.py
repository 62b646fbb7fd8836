from __future__ import annotations

from array import array

import pytest

from leadline.cache.snapshots import SnapshotStore
from leadline.core.request import Request, SamplingParams, SnapshotKind

INTERVAL, JUNCTION, PROMPT_END, TURN_END = SnapshotKind


@pytest.fixture
def store() -> SnapshotStore:
    """Rows 10, 11 and 12."""
    return SnapshotStore(first_slot=10, capacity=3)


@pytest.fixture
def request_() -> Request:
    return Request("a", array("i", [1]), 1, SamplingParams(), arrival=0.0)


def attach(store: SnapshotStore, request: Request, page: int, kind: SnapshotKind) -> None:
    assert store.save(request, 256, kind) is not None
    store.settle(request, request.pending_snapshots[-1], page)


def pages_in_order_of_eviction(store: SnapshotStore, request: Request) -> list[int]:
    """Evict everything, one by one, by keeping every row pending."""
    order: list[int] = []
    before = set(store)
    while store.save(request, 256, PROMPT_END) is not None:
        order += before - set(store)
        before = set(store)
    return order


@pytest.mark.parametrize(
    ("kinds", "order"),
    [
        ((TURN_END, JUNCTION, INTERVAL), [3, 2, 1]),
        ((PROMPT_END, TURN_END, PROMPT_END), [1, 2, 3]),
        ((JUNCTION, TURN_END, JUNCTION), [1, 3, 2]),
        ((INTERVAL, INTERVAL, TURN_END), [1, 2, 3]),
    ],
    ids=["by value", "tails by age", "junctions by age", "interval before tail"],
)
def test_the_least_valuable_and_then_the_oldest_is_evicted(
    store: SnapshotStore, request_: Request, kinds: tuple[SnapshotKind, ...], order: list[int]
) -> None:
    for page, kind in enumerate(kinds, start=1):
        attach(store, request_, page, kind)
    assert pages_in_order_of_eviction(store, request_) == order
    assert store.num_evicted == 3


def test_a_snapshot_that_was_wanted_again_is_worth_as_much_as_a_tail(
    store: SnapshotStore, request_: Request
) -> None:
    for page, kind in enumerate((INTERVAL, INTERVAL, TURN_END), start=1):
        attach(store, request_, page, kind)
    store.touch(1)
    assert pages_in_order_of_eviction(store, request_) == [2, 3, 1]


def test_pending_snapshots_are_not_evicted(store: SnapshotStore, request_: Request) -> None:
    rows = [store.save(request_, 256 * n, PROMPT_END) for n in range(1, 5)]
    assert rows == [10, 11, 12, None]
    store.check_integrity([10, 11, 12])


def test_without_rows_nothing_is_saved(request_: Request) -> None:
    assert SnapshotStore(first_slot=10, capacity=0).save(request_, 256, TURN_END) is None
    assert not request_.pending_snapshots


def test_the_snapshot_of_a_turns_end_moves_along_and_that_of_the_prompt_stays(
    store: SnapshotStore, request_: Request
) -> None:
    rows = [
        store.save(request_, 256, PROMPT_END),
        store.save(request_, 512, TURN_END),
        store.save(request_, 768, TURN_END),
    ]
    assert rows == [10, 11, 11]
    assert [snapshot.boundary for snapshot in request_.pending_snapshots] == [256, 768]
    store.check_integrity([10, 11])


def test_a_page_keeps_its_first_snapshot(store: SnapshotStore, request_: Request) -> None:
    attach(store, request_, 1, PROMPT_END)
    attach(store, request_, 1, PROMPT_END)
    kept = store.get(1)
    assert kept is not None
    assert kept.slot == 10
    store.check_integrity([])


def test_a_snapshot_carries_the_floors_of_its_slot(store: SnapshotStore, request_: Request) -> None:
    request_.floor_lo, request_.floor_up = 7, 9
    attach(store, request_, 1, PROMPT_END)
    kept = store.get(1)
    assert kept is not None
    assert (kept.boundary, kept.floor_lo, kept.floor_up) == (256, 7, 9)


def test_a_leaked_row_is_found(store: SnapshotStore, request_: Request) -> None:
    store.save(request_, 256, PROMPT_END)
    with pytest.raises(AssertionError, match="snapshot rows free, pending or attached"):
        store.check_integrity([])
