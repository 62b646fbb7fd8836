"""Whether a waiting request fits now, and from which position it is fed. No torch.

What the cache knows of its text decides: a slot of its session that is still hot, a prefix whose
windows are rebuilt by replay or restored from a snapshot, or nothing (cache-and-scheduling 2 to 5).
"""

from __future__ import annotations

from collections.abc import Sequence

from leadline.cache.manager import CacheManager, Hit
from leadline.cache.replay import ReplayPolicy
from leadline.cache.slots import HotSlot
from leadline.core.request import Request, RequestState
from leadline.engine.metrics import EngineMetrics


class Admission:
    """Gives a waiting request its slot and what is cached of it, and sets H, s, U and E."""

    def __init__(self, cache: CacheManager, metrics: EngineMetrics, policy: ReplayPolicy) -> None:
        self._cache = cache
        self._metrics = metrics
        self._policy = policy

    def admit(self, request: Request, reserved: int) -> list[tuple[int, int]] | None:
        """Start a request, if its pages fit beside ``reserved`` ones.

        Returns:
            Slots to copy before its first row, ``(from, to)`` each; None, with nothing changed,
            when it does not fit.
        """
        known_need = self._cache.num_needed(request)
        if known_need and known_need + reserved > self._cache.num_free_pages:
            return None
        copies = self._admit_hot(request, reserved)
        if copies is None:
            copies = self._admit_cached(request, reserved)
        if copies is None:
            return None
        request.state = RequestState.PREFILL
        request.confirmed = request.cached
        if not request.num_preemptions:
            self._count_first_admission(request)
        return copies

    def reserved_pages(self, running: Sequence[Request]) -> int:
        """Pages that somebody counts on: running prefills and growing decodes (5.5)."""
        if not running:
            return 0
        prefills = [r for r in running if r.state is RequestState.PREFILL]
        missing = sum(
            max(0, self._whole_prefill(r, r.prefill_end) - len(r.pages)) for r in prefills
        )
        num_decodes = len(running) - len(prefills)
        return missing + max(self._cache.num_pages // 100, min(num_decodes, 64))

    def _whole_prefill(self, request: Request, prefill_end: int) -> int:
        """Pages of a prefill: those of its rows and one to decode into (5.5).

        Never more than the request can use in its whole life: by the same formula it was found
        feasible at arrival, so it cannot wait for pages that do not exist.
        """
        pages_of = self._cache.pages_of
        return min(pages_of(prefill_end) + 1, pages_of(max_positions(request)))

    def _admit_hot(self, request: Request, reserved: int) -> list[tuple[int, int]] | None:
        """Go on after the tokens of a slot that is still there; nothing is replayed (4.6)."""
        hot = None if request.reads_prompt else self._cache.lookup_hot(request)
        if hot is None:
            return None
        end = len(request.tokens)
        needed = self._whole_prefill(request, end) - len(hot.pages)
        if needed + reserved > self._cache.num_free_pages:
            return None
        self._cache.take_hot(request, hot)
        request.prefill_end, request.junction = end, 0
        request.cached = request.fed = hot.confirmed
        request.floor_lo, request.floor_up = hot.floor_lo, self._hot_floor_up(hot, end)
        return []

    def _hot_floor_up(self, hot: HotSlot, prefill_end: int) -> int:
        """U stays where it was, unless the new rows alone fill the window."""
        trimmed = self._policy.upper_floor(0, prefill_end)
        return trimmed if trimmed > hot.confirmed else hot.floor_up

    def _admit_cached(self, request: Request, reserved: int) -> list[tuple[int, int]] | None:
        """Start after the longest cached prefix that the request may use, however short."""
        end = len(request.tokens)
        hit = self._find_hit(request)
        needed = self._whole_prefill(request, end) - len(hit.pages)
        if not self._cache.make_room(needed + reserved, beside=hit):
            self._cache.refuse(request, hit, needed)
            return None
        self._cache.admit(request, hit)
        request.prefill_end, request.junction = end, hit.num_indexed_tokens
        request.cached = request.fed = hit.num_tokens
        if hit.snapshot is None:
            request.fed = request.floor_lo = self._policy.start(hit.num_tokens)
            upper_start = request.floor_lo
        else:
            request.floor_lo = hit.snapshot.floor_lo
            # The saved window of the upper layers goes on where they had run before the boundary.
            upper_start = min(hit.snapshot.floor_up, hit.num_tokens)
        request.floor_up = self._policy.upper_floor(upper_start, end)
        if request.reads_prompt:
            request.floor_up = request.floor_lo
        return [] if hit.snapshot is None else [(hit.snapshot.slot, request.slot)]

    def _find_hit(self, request: Request) -> Hit:
        """The cached prefix that the request may use; empty for those who read prompt rows."""
        limit = 0 if request.reads_prompt else self._policy.hit_limit(len(request.tokens))
        hit = self._cache.lookup(request, limit)
        if self._policy.is_worthwhile(hit.num_tokens):
            return hit
        return Hit(num_indexed_tokens=hit.num_indexed_tokens)

    def _count_first_admission(self, request: Request) -> None:
        """What usage and the hit rate say; a resume after a preemption changes neither (5.6)."""
        request.num_cached_tokens = min(request.cached, request.num_prompt_tokens - 1)
        request.num_replayed_tokens = request.cached - request.fed
        counters = self._metrics.counters
        counters["prompt_tokens"] += request.num_prompt_tokens
        counters["prefix_cache_queries"] += request.num_prompt_tokens
        counters["prefix_cache_hits"] += request.cached
        counters["prompt_tokens_cached"] += request.num_cached_tokens


def max_positions(request: Request) -> int:
    """Positions that a request reaches at most; decides feasibility at arrival and later (5.5)."""
    return request.num_prompt_tokens + request.sampling.max_tokens
