"""``CacheManager``: the one class that the scheduler talks to about memory.

Only this class changes a request's ``pages``, ``slot``, digests and snapshots.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from leadline.cache.pages import PageAllocator
from leadline.cache.prefix import PrefixIndex, extend_digests, num_full_pages, root_digest
from leadline.cache.refusals import Refusals
from leadline.cache.sizing import CacheSize, pages_of
from leadline.cache.slots import HotSlot, HotSlots, SlotAllocator
from leadline.cache.snapshots import SnapshotStore
from leadline.core.request import Request, Snapshot, SnapshotKind


@dataclass(frozen=True, slots=True)
class Hit:
    """What a lookup found; good for the step in which it was made.

    Attributes:
        num_tokens: H, whole pages.
        pages: those of ``[0, num_tokens)``.
        snapshot: of the boundary ``num_tokens``, where hits need one.
        num_indexed_tokens: what the pages alone would give; more than ``num_tokens`` where the
            deepest boundaries have no snapshot, and then a junction of two chains (2.8).
    """

    num_tokens: int = 0
    pages: tuple[int, ...] = ()
    snapshot: Snapshot | None = None
    num_indexed_tokens: int = 0


_NO_HIT = Hit()


class CacheManager:
    """Gives pages and slots to requests, finds known prefixes, and can prove its books.

    A request holds one slot from admission to its end and ``ceil(positions / page_size)`` pages.
    Full pages of confirmed tokens are indexed by what they hold; when their last holder leaves
    they are kept for later requests until their memory is needed (cache-and-scheduling 2).

    Attributes:
        page_size: token positions of a page.
        num_evicted_pages: indexed pages that were given up for their memory so far.
    """

    def __init__(
        self,
        size: CacheSize,
        *,
        root: bytes = b"",
        enable_prefix_caching: bool = False,
        needs_snapshot: bool = False,
        hot_slots: int = 0,
    ) -> None:
        """Start with everything free.

        Args:
            size: rows of the cache tensors.
            root: ``root_digest`` of what this engine's pages depend on beside their text.
            enable_prefix_caching: whether pages are indexed, and kept when nobody holds them.
            needs_snapshot: hits end at boundaries with a snapshot only (exact mode).
            hot_slots: finished requests whose slots are kept for their sessions, at most.
        """
        self.page_size = size.page_size
        self.num_evicted_pages = 0
        self._root = root
        self._enable_prefix_caching = enable_prefix_caching
        self._needs_snapshot = needs_snapshot
        self._pages = PageAllocator(size.num_pages)
        self._slots = SlotAllocator(size.num_slots)
        self._hot = HotSlots(hot_slots)
        self._index = PrefixIndex()
        self._snapshots = SnapshotStore(size.num_slots, size.num_snapshots)
        self._refusals = Refusals()

    @property
    def num_pages(self) -> int:
        """Pages that requests can hold, the null page not counted."""
        return self._pages.capacity

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds, those that are kept for prefix hits included."""
        return self._pages.num_free + self._pages.num_kept

    @property
    def num_cached_pages(self) -> int:
        """Pages that nobody holds and a prefix hit can still find."""
        return self._pages.num_kept

    @property
    def num_slots(self) -> int:
        """Requests that can run at once, the padding slot not counted."""
        return self._slots.capacity

    @property
    def num_free_slots(self) -> int:
        """Slots that ``admit`` can give, those of hot sessions included."""
        return self._slots.num_free + len(self._hot)

    @property
    def num_hot_slots(self) -> int:
        return len(self._hot)

    @property
    def num_snapshots(self) -> int:
        """Snapshots that a hit can find."""
        return len(self._snapshots)

    @property
    def num_evicted_snapshots(self) -> int:
        """Snapshots that were given up for a newer one so far."""
        return self._snapshots.num_evicted

    @property
    def takes_snapshots(self) -> bool:
        """Whether hits need snapshots, so that somebody has to save them."""
        return self._enable_prefix_caching and self._needs_snapshot

    def pages_of(self, num_tokens: int) -> int:
        """Pages that hold the first ``num_tokens`` positions of a request."""
        return pages_of(num_tokens, self.page_size)

    # Admission: lookup, then admit or take_hot, in one step.

    def lookup(self, request: Request, cap: int) -> Hit:
        """The longest known prefix of a waiting request, ``cap`` tokens at most (2.4).

        Nothing changes but the request's digests: pages are pinned by ``admit``.
        """
        assert not request.pages, f"request {request.request_id} is looked up while it has pages"
        self._start_chain(request)
        if not self._enable_prefix_caching:
            return Hit()
        num_pages = num_full_pages(cap, self.page_size)
        self._extend_digests(request, num_pages)
        pages = self._index.match(request.digests, num_pages)
        num_indexed = len(pages)
        if self._needs_snapshot:
            while pages and pages[-1] not in self._snapshots:
                pages.pop()
        return Hit(
            num_tokens=len(pages) * self.page_size,
            pages=tuple(pages),
            snapshot=self._snapshots.get(pages[-1]) if self._needs_snapshot and pages else None,
            num_indexed_tokens=num_indexed * self.page_size,
        )

    def num_free_pages_beside(self, hit: Hit) -> int:
        """Free pages that are left once the hit's own are pinned (5.5)."""
        kept = self._pages.kept
        return self.num_free_pages - sum(page in kept for page in hit.pages)

    def refuse(self, request: Request, hit: Hit, num_pages: int) -> None:
        """Note that there was no room for ``num_pages`` of a waiting request beside its hit."""
        if not len(self._hot):  # otherwise what is free says little about what can be had
            num_pinned = self.num_free_pages - self.num_free_pages_beside(hit)
            self._refusals.note(request, num_pages + num_pinned)

    def num_needed(self, request: Request) -> int:
        """Free pages without which looking up a refused request is in vain; 0 when unknown."""
        return self._refusals.needed(request)

    def admit(self, request: Request, hit: Hit) -> None:
        """Pin the pages of a hit for the request and give it a slot.

        Raises:
            OutOfSlots: none is free, and no hot one is left to drop.
        """
        for page, digest in zip(hit.pages, request.digests, strict=False):
            if not self._pages.num_holders(page):
                self._refusals.prefix_grew(digest)
            self._pages.share(page)
        request.pages.extend(hit.pages)
        request.committed = len(hit.pages)
        if hit.snapshot is not None:
            self._snapshots.touch(hit.pages[-1])
        self.take_slot(request)

    def take_slot(self, request: Request) -> None:
        """Give the request its slot.

        Raises:
            OutOfSlots: none is free, and no hot one is left to drop.
        """
        assert not request.slot, f"request {request.request_id} already has slot {request.slot}"
        if not self._slots.num_free and len(self._hot):
            self._drop_oldest_hot()
        request.slot = self._slots.allocate()

    def grow(self, request: Request, end: int) -> bool:
        """Let the request's pages cover positions ``[0, end)``; all of it or nothing.

        Pages that are only indexed are evicted, oldest first; hot slots go when those do not
        suffice.

        Returns:
            Whether they do now; False when too few pages are free.
        """
        missing = self.pages_of(end) - len(request.pages)
        if missing <= 0:
            return True
        if not self.make_room(missing):
            return False
        for _ in range(missing):
            if not self._pages.num_free:
                self._evict_page()
            request.pages.append(self._pages.allocate())
        return True

    def commit(self, request: Request, confirmed: int) -> None:
        """Index every page of the first ``confirmed`` positions that is full (2.5).

        Confirmed tokens are accepted ones, not drafts or guesses, and their step was launched.
        """
        num_pages = num_full_pages(confirmed, self.page_size)
        if not self._enable_prefix_caching or num_pages <= request.committed:
            return
        self._extend_digests(request, num_pages)
        for i in range(request.committed, num_pages):
            self._index.add(request.digests[i], request.pages[i])
            self._refusals.prefix_grew(request.digests[i])
        request.committed = num_pages
        self._attach_snapshots(request, at_end=False)

    def release(self, request: Request) -> None:
        """Take back everything the request holds, its last page first.

        The order lets the deeper pages of a chain be evicted before those that lead to them (2.6).
        """
        self._refusals.drop(request)
        self._end_snapshots(request)
        self._release_pages(request.pages)
        request.committed = 0
        if request.slot:
            self._slots.release(request.slot)
            request.slot = 0

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix, snapshot and hot slot; later requests find nothing older.

        Returns:
            Whether no page is held any more. What running requests hold stays theirs, and nobody
            else will find it or what they add to it.
        """
        while len(self._hot):
            self._drop_oldest_hot()
        while self._pages.num_kept:
            self._forget(self._pages.evict())
        for page in self._index.pages:
            self._forget(page)
        self._root = root_digest(self._root)
        self._refusals.clear()
        return self.num_free_pages == self.num_pages

    # Snapshots (2.8).

    def save_snapshot(self, request: Request, boundary: int, kind: SnapshotKind) -> int | None:
        """A row to copy the request's slot into, after the step that brings it to ``boundary``.

        Hits find the snapshot from the commit of its boundary's page on. That of a turn's end
        moves along instead: the next one takes its row, and ``release`` attaches the last. The
        row may be that of a snapshot evicted here, so a step restores slots before it saves any.

        Returns:
            None when the boundary has a snapshot already or no row can be had.
        """
        num_pages = num_full_pages(boundary, self.page_size)
        assert num_pages * self.page_size == boundary > 0, f"{boundary} is no page boundary"
        if num_pages <= len(request.digests):
            page = self._index.page_of(request.digests[num_pages - 1])
            if page is not None and page in self._snapshots:
                self._snapshots.touch(page)
                return None
        return self._snapshots.save(request, boundary, kind)

    def _attach_snapshots(self, request: Request, *, at_end: bool) -> None:
        """Attach pending snapshots whose boundary's page is committed."""
        for snapshot in tuple(request.pending_snapshots):
            num_pages = num_full_pages(snapshot.boundary, self.page_size)
            waits = snapshot.kind is SnapshotKind.TURN_END and not at_end
            if num_pages <= request.committed and not waits:
                page = self._index.page_of(request.digests[num_pages - 1])
                self._snapshots.settle(request, snapshot, page)
                self._refusals.prefix_grew(request.digests[num_pages - 1])

    def _end_snapshots(self, request: Request) -> None:
        """Attach what can be attached and give back the rest."""
        self._attach_snapshots(request, at_end=True)
        for snapshot in tuple(request.pending_snapshots):
            self._snapshots.settle(request, snapshot, None)

    # Hot slots: the next turn of a session that still has its slot needs no replay.

    def keep_hot(self, request: Request, confirmed: int) -> bool:
        """Keep a finished request's slot and pages for its session, instead of ``release``.

        The slot holds the state of its first ``confirmed`` tokens, all of them accepted.

        Returns:
            False when hot slots are off, the request has no session, or the cache was reset since
            it was looked up; then release it.
        """
        is_stale = request.digest_root != self._request_root(request)
        if not self._hot.capacity or request.session_key is None or is_stale:
            return False
        if (older := self._hot.pop(request)) is not None:
            self._release_hot(older)
        elif len(self._hot) == self._hot.capacity:
            self._drop_oldest_hot()
        self._end_snapshots(request)
        num_pages = self.pages_of(confirmed)
        self._release_pages(request.pages[num_pages:])  # lookahead
        hot = HotSlot(
            slot=request.slot,
            pages=request.pages[:num_pages],
            tokens=request.tokens[:confirmed],
            extras=request.page_extras,
            floor_lo=request.floor_lo,
            floor_up=request.floor_up,
            committed=request.committed,
        )
        self._hot.put(request, hot)
        self._refusals.clear()  # there is a slot again whose pages could be had
        request.slot, request.pages, request.committed = 0, array("i"), 0
        return True

    def lookup_hot(self, request: Request) -> HotSlot | None:
        """The hot slot that a waiting request continues, token by token; nothing changes."""
        hot = self._hot.get(request)
        return hot if hot is not None and hot.continues_in(request) else None

    def take_hot(self, request: Request, hot: HotSlot) -> None:
        """Give the slot and pages that ``lookup_hot`` found to the request."""
        taken = self._hot.pop(request)
        assert taken is hot, f"request {request.request_id} takes a hot slot of somebody else"
        self._start_chain(request)
        self._extend_digests(request, hot.committed)
        request.slot, request.pages, request.committed = hot.slot, hot.pages, hot.committed

    def make_room(self, num_pages: int, *, beside: Hit = _NO_HIT) -> bool:
        """Drop hot slots, oldest first, until ``num_pages`` are free beside those of a hit.

        Returns:
            Whether they are. Where all hot slots would not suffice, none is dropped (2.6).
        """
        missing = num_pages - self.num_free_pages_beside(beside)
        if missing > 0 and (not len(self._hot) or missing > self._num_hot_pages(beside)):
            return False
        while self.num_free_pages_beside(beside) < num_pages:
            self._drop_oldest_hot()
        return True

    def _num_hot_pages(self, beside: Hit) -> int:
        """Pages that only hot slots hold, and no hit wants."""
        held, wanted = Counter(page for hot in self._hot for page in hot.pages), set(beside.pages)
        return sum(
            self._pages.num_holders(page) == count
            for page, count in held.items()
            if page not in wanted
        )

    def _drop_oldest_hot(self) -> None:
        self._release_hot(self._hot.pop_oldest())

    def _release_hot(self, hot: HotSlot) -> None:
        self._release_pages(hot.pages)
        self._slots.release(hot.slot)

    # Pages and digests.

    def _request_root(self, request: Request) -> bytes:
        salt = request.cache_salt
        return self._root if salt is None else root_digest(self._root, salt)

    def _start_chain(self, request: Request) -> None:
        """Set the root of a request's digests; old ones go when the cache was reset meanwhile."""
        root = self._request_root(request)
        if request.digest_root != root:
            request.digest_root = root
            request.digests.clear()

    def _extend_digests(self, request: Request, num_pages: int) -> None:
        extend_digests(
            request.digests,
            request.tokens,
            num_pages,
            page_size=self.page_size,
            root=request.digest_root,
            extras=request.page_extras,
        )

    def _evict_page(self) -> None:
        self._forget(self._pages.evict())
        self.num_evicted_pages += 1

    def _forget(self, page: int) -> None:
        """A page leaves the index, and its snapshot dies with it."""
        self._index.forget(page)
        self._snapshots.drop(page)

    def _release_pages(self, pages: array[int]) -> None:
        while pages:
            page = pages.pop()
            self._pages.release(page, keep=page in self._index)

    def check_integrity(self, live: Collection[Request]) -> None:
        """Assert invariants 1, 2, 4 to 6, 10, 14 and 16 of cache-and-scheduling 7.

        Args:
            live: every request of the engine, waiting ones included.
        """
        self._pages.check_integrity()
        self._index.check_integrity()
        kept = set(self._pages.kept)
        unheld = {page for page in self._index.pages if not self._pages.num_holders(page)}
        assert kept == unheld, f"kept pages and unheld indexed ones differ: {sorted(kept ^ unheld)}"

        tables = [(request.pages, request.committed) for request in live]
        tables += [(hot.pages, hot.committed) for hot in self._hot]
        holders = Counter(page for pages, _ in tables for page in pages)
        for page in range(1, self._pages.capacity + 1):
            known, found = self._pages.num_holders(page), holders[page]
            assert known == found, f"page {page} counts {known} holders, {found} tables name it"
        assert not holders[0], "the null page is in a live request's table"
        for pages, committed in tables:
            shared = [
                page for page in pages[committed:] if holders[page] > 1 or page in self._index
            ]
            assert not shared, f"pages {shared} are shared or indexed before they are committed"

        slots = [request.slot for request in live if request.slot]
        self._slots.check_integrity(slots + [hot.slot for hot in self._hot])
        pending = [snapshot.slot for request in live for snapshot in request.pending_snapshots]
        self._snapshots.check_integrity(pending)
        lost = [page for page in self._snapshots if page not in self._index]
        assert not lost, f"snapshots outlived their pages {lost}"
        for request in live:
            self._check_request(request)

    def _check_request(self, request: Request) -> None:
        name, pages = request.request_id, request.pages
        assert len(set(pages)) == len(pages), f"request {name} has a page twice"
        assert bool(pages) <= bool(request.slot), f"request {name} has pages and no slot"
        needed = self.pages_of(max(request.cached, request.fed))
        assert needed <= len(pages) <= needed + 1, (
            f"request {name} holds {len(pages)} pages; {request.fed} positions of "
            f"{self.page_size} a page need {needed}"
        )
        assert request.committed <= len(pages), f"request {name} has committed more than it holds"
        for i in range(request.committed):
            digest = self._index.digest_of(pages[i])
            assert digest in (None, request.digests[i]), f"page {pages[i]} is not that of {name}"
