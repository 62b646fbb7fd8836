"""SWA bounded replay: where feeding starts after a prefix hit, and which rows need the upper half.

Three integers a request come from here: ``write_from`` (H, the cached length), ``floor_lo`` (s) and
``floor_up`` (U). Window KV is not cached: after a hit the last rows before H are fed again with
window reads clipped at s, and layers above the cut run only on rows at or above U
(cache-and-scheduling 3 and 4). All of it is arithmetic on positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from leadline.core.request import SnapshotKind


@dataclass(frozen=True, slots=True)
class ReplayPolicy:
    """Which halves are bounded, and by how many rows.

    Attributes:
        lower: after a hit, window KV of the lower layers is rebuilt by replay; else a hit needs
            a snapshot of the slot.
        upper: layers above the cut run on the last ``length`` rows of a prompt; else on all.
        length: rows that are replayed, ``sliding_window`` by default. With a full halo of
            ``window - 1`` rows a layer nothing that is read later is approximate.
        window: ``sliding_window``.
        snapshot_interval: tokens between the snapshots of a long prompt; 0 takes none for that.
    """

    lower: bool
    upper: bool
    length: int
    window: int
    snapshot_interval: int = 16384

    @property
    def needs_snapshot(self) -> bool:
        return not self.lower

    def hit_limit(self, num_tokens: int) -> int:
        """The longest hit that may be used for a prompt of E tokens (2.4, 3.6).

        A replay feeds the last token again and so may follow a hit of the whole prompt; without
        one, the last token must be left to feed.
        """
        return num_tokens if self.lower else num_tokens - 1

    def is_worthwhile(self, hit: int) -> bool:
        """Whether a hit saves anything: one within the window would be recomputed whole (3.7)."""
        return hit > (self.window if self.lower else 0)

    def start(self, hit: int) -> int:
        """s: the first position that is fed again after a hit of H tokens (8.3)."""
        return max(0, hit - self.length)

    def upper_floor(self, start: int, prefill_end: int) -> int:
        """U: the first position for which the upper layers run (4.2).

        Never below ``start``: the upper layers have no window row there.
        """
        return max(start, prefill_end - self.length) if self.upper else start

    def snapshots_of_prompt(
        self, fed: int, prefill_end: int, *, junction: int, page_size: int
    ) -> dict[int, SnapshotKind]:
        """Boundaries within ``[fed + 1, E)`` at which the slot is saved next, and why (2.8).

        The next of an interval, where another chain ended (``junction``), and the last one of all.
        """
        boundaries = {}
        if self.snapshot_interval:
            step = -(-self.snapshot_interval // page_size) * page_size
            boundaries[(fed // step + 1) * step] = SnapshotKind.INTERVAL
        boundaries[junction] = SnapshotKind.JUNCTION
        boundaries[(prefill_end - 1) // page_size * page_size] = SnapshotKind.PROMPT_END
        return {b: kind for b, kind in boundaries.items() if fed < b < prefill_end}


def cut_chunk(
    *, fed: int, cached: int, floor_up: int, prefill_end: int, room: int, largest: int
) -> int:
    """Rows of the next prefill chunk (5.3, 8.3).

    A replay stays whole where a step can hold it, and a chunk stops at U, so that the upper half
    runs once.

    Args:
        fed: next position to feed.
        cached: H; rows below it are a replay.
        floor_up: U.
        prefill_end: E.
        room: rows that are left in this step.
        largest: rows that some step will surely have for a prefill.

    Returns:
        Rows to feed from ``fed`` on; 0 to wait for a step with more room.
    """
    end = min(prefill_end, fed + room)
    if end < cached and cached - fed <= largest:
        return 0
    if fed < floor_up < end < prefill_end:
        end = floor_up
    return max(0, end - fed)


def num_upper_rows(start: int, end: int, floor_up: int) -> int:
    """How many of the rows ``[start, end)`` run the upper half: the last ones (4.2)."""
    return max(0, end - max(start, floor_up))
