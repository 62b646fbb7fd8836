"""How many pages and slots a memory budget buys (cache-and-scheduling 1.7)."""

from __future__ import annotations

from dataclasses import dataclass

from leadline.cache.layout import CacheLayout
from leadline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Rows of the cache tensors, the null page and the padding slot included.

    Attributes:
        page_size: token positions of a page.
        num_snapshots: rows of the slot tensors behind ``num_slots``, for what is saved of slots.
    """

    num_pages: int
    num_slots: int
    page_size: int
    num_snapshots: int = 0

    @property
    def num_slot_rows(self) -> int:
        """Rows of the slot tensors: slots, then snapshots."""
        return self.num_slots + self.num_snapshots

    def num_bytes(self, layout: CacheLayout) -> int:
        """Bytes of every page, slot and snapshot together."""
        slots = self.num_slots * layout.slot_bytes + self.num_snapshots * layout.snapshot_bytes
        return self.num_pages * layout.page_bytes + slots


def pages_of(num_tokens: int, page_size: int) -> int:
    """Pages that hold the first ``num_tokens`` positions of a request."""
    return -(-num_tokens // page_size)


def longest_model_len(layout: CacheLayout, budget_bytes: int) -> int:
    """The longest sequence, in tokens, that one request can reach; 0 or less when none fits.

    The null page, the padding slot and the request's own slot are paid first.
    """
    left = budget_bytes - layout.page_bytes - 2 * layout.slot_bytes
    return left // layout.page_bytes * layout.page_size


def size_cache(
    layout: CacheLayout,
    *,
    budget_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    snapshot_memory_fraction: float = 0.0,
) -> CacheSize:
    """Split a budget: one request of ``max_model_len`` always fits, then snapshots, slots, pages.

    Slots beyond the first take at most half of what that one request and the snapshots leave, so
    that a short budget gives few requests with room rather than many without. Snapshots take
    ``snapshot_memory_fraction`` of what the one request leaves: 0 where hits need none.

    Raises:
        ConfigError: not even one request of ``max_model_len`` tokens fits.
    """
    longest = longest_model_len(layout, budget_bytes)
    num_pages = pages_of(max_model_len, layout.page_size) + 1
    minimum = CacheSize(num_pages, num_slots=2, page_size=layout.page_size)
    if max_model_len > longest:
        needed = minimum.num_bytes(layout)
        advice = (
            f"lower max_model_len to {longest} or give it more"
            if longest > 0
            else "no length fits, so give it more"
        )
        raise ConfigError(
            f"max_model_len is {max_model_len}, and one such request needs {needed} bytes of "
            f"cache, but the budget is {budget_bytes} bytes; {advice} (kv_cache_memory_bytes, "
            "gpu_memory_utilization)"
        )
    spare = budget_bytes - minimum.num_bytes(layout)
    num_snapshots = int(snapshot_memory_fraction * spare) // layout.snapshot_bytes
    spare -= num_snapshots * layout.snapshot_bytes
    num_slots = 2 + min(max_num_seqs - 1, spare // 2 // layout.slot_bytes)
    num_pages += (spare - (num_slots - 2) * layout.slot_bytes) // layout.page_bytes
    return CacheSize(num_pages, num_slots, layout.page_size, num_snapshots)
