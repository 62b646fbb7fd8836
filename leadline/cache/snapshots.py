"""Snapshots: slots saved at page boundaries, so that exact mode has hits there too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from leadline.core.request import Request, Snapshot, SnapshotKind

# Evicted in this order (cache-and-scheduling 2.6); prompt and turn ends are both session tails.
_RANKS = {
    SnapshotKind.INTERVAL: 0,
    SnapshotKind.JUNCTION: 1,
    SnapshotKind.PROMPT_END: 2,
    SnapshotKind.TURN_END: 2,
}
_HIGHEST_RANK = max(_RANKS.values())


class SnapshotStore:
    """Rows ``first_slot..first_slot + capacity - 1`` of the slot tensors, and what lies in them.

    A row is free, pending (a request has it and nobody can find it) or attached to the page that
    ends at its boundary. Each page has one snapshot at most.
    """

    def __init__(self, first_slot: int, capacity: int) -> None:
        self.first_slot = first_slot
        self.capacity = capacity
        self.num_evicted = 0
        self._free = list(range(first_slot + capacity - 1, first_slot - 1, -1))
        # Per rank: page -> its snapshot, least recently used first.
        self._attached = tuple(OrderedDict[int, Snapshot]() for _ in range(_HIGHEST_RANK + 1))
        self._rank_of: dict[int, int] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._rank_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._rank_of)

    def __len__(self) -> int:
        return len(self._rank_of)

    def get(self, page: int) -> Snapshot | None:
        rank = self._rank_of.get(page)
        return None if rank is None else self._attached[rank][page]

    def save(self, request: Request, boundary: int, kind: SnapshotKind) -> int | None:
        """Make a snapshot pending on the request; that of a turn's end replaces the one before.

        Returns:
            Its row; None when every row is pending, or there are none at all.
        """
        if kind is SnapshotKind.TURN_END:
            for old in [s for s in request.pending_snapshots if s.kind is kind]:
                self.settle(request, old, None)
        if not self._free and not self._evict():
            return None
        slot = self._free.pop()
        request.pending_snapshots.append(
            Snapshot(slot, boundary, request.floor_lo, request.floor_up, kind)
        )
        return slot

    def _evict(self) -> bool:
        """Drop the least valuable snapshot; False when none is attached."""
        order = next((order for order in self._attached if order), None)
        if order is None:
            return False
        self.drop(next(iter(order)))
        self.num_evicted += 1
        return True

    def settle(self, request: Request, snapshot: Snapshot, page: int | None) -> None:
        """Let hits that end at ``page`` find a pending snapshot; without a page it is dropped.

        Where the page has one already, that one stays.
        """
        request.pending_snapshots.remove(snapshot)
        if page is None or page in self:
            self._free.append(snapshot.slot)
        else:
            rank = self._rank_of[page] = _RANKS[snapshot.kind]
            self._attached[rank][page] = snapshot

    def touch(self, page: int) -> None:
        """Mark as used; one that was wanted again is from then on worth as much as a tail."""
        snapshot = self._attached[self._rank_of[page]].pop(page)
        self._rank_of[page] = _HIGHEST_RANK
        self._attached[_HIGHEST_RANK][page] = snapshot

    def drop(self, page: int) -> None:
        """Forget the page's snapshot, if there is one."""
        rank = self._rank_of.pop(page, None)
        if rank is not None:
            self._free.append(self._attached[rank].pop(page).slot)

    def check_integrity(self, pending: list[int]) -> None:
        """Assert that free, attached and ``pending`` rows make the whole (invariant 16)."""
        attached = {page: snap for order in self._attached for page, snap in order.items()}
        assert attached.keys() == self._rank_of.keys(), "snapshots and their ranks disagree"
        every = sorted([*self._free, *pending, *(snap.slot for snap in attached.values())])
        rows = list(range(self.first_slot, self.first_slot + self.capacity))
        assert every == rows, f"snapshot rows free, pending or attached: {every}"
