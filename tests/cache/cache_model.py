"""A brute-force model of the cache's books, beside a ``CacheManager`` that goes through the same.

Pages and slot rows carry what a device would hold: the whole text that leads to each position. So
a page that is shared, evicted or indexed wrongly shows as a wrong text, whoever is to blame.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

from leadline.cache.manager import CacheManager, Hit
from leadline.cache.sizing import CacheSize
from leadline.core.request import Request, SamplingParams, SnapshotKind

PAGE_SIZE = 4
SALTS = (None, "tenant")
SESSIONS = (None, "s", "t")

# What a page depends on: salt, resets seen at lookup, and all tokens up to its end.
Text = tuple[str | None, int, tuple[int, ...]]


@dataclass(eq=False)
class Live:
    """A request and what the model says of it.

    Attributes:
        epoch: resets that had happened when it was last looked up.
        table: the pages it holds.
        num_known: pages of the table that were committed, whether they got into the index or not.
    """

    request: Request
    epoch: int
    table: list[int] = field(default_factory=list)
    num_known: int = 0

    def text(self, n: int) -> Text:
        return (self.request.cache_salt, self.epoch, tuple(self.request.tokens[:n]))


class CacheModel:
    """Operations on a small cache; every one asserts that manager and model agree."""

    def __init__(self, *, num_pages: int, num_slots: int, exact: bool, hot_slots: int) -> None:
        self.exact = exact
        size = CacheSize(num_pages + 1, num_slots + 1, PAGE_SIZE, num_snapshots=3 if exact else 0)
        self.cache = CacheManager(
            size, enable_prefix_caching=True, needs_snapshot=exact, hot_slots=hot_slots
        )
        self.epoch = self.num_requests = 0
        self.waiting: list[Live] = []
        self.running: list[Live] = []
        self.texts: list[list[int]] = [[]]  # of all requests so far, for later ones to continue
        self.free = set(range(1, num_pages + 1))
        self.kept: list[int] = []  # oldest first
        self.index: dict[Text, int] = {}
        self.hot: dict[tuple[str, str | None], Live] = {}
        self.page_rows: dict[tuple[int, int], Text] = {}  # (page, position in it) -> its text
        self.slot_rows: dict[int, Text] = {}  # of the slot tensors
        self.seen: Counter[str] = Counter()  # what traces have reached

    # What the scheduler does.

    def arrive(self, base: int, cut: int, new: list[int], salt: int, session: int) -> None:
        """A request that continues an earlier text, less its last ``cut`` tokens."""
        text = self.texts[base % len(self.texts)]
        tokens = text[: max(0, len(text) - cut)] + new
        self.num_requests += 1
        request = Request(
            str(self.num_requests),
            array("i", tokens),
            len(tokens),
            SamplingParams(),
            arrival=0.0,
            cache_salt=SALTS[salt],
            session_key=SESSIONS[session],
        )
        self.waiting.append(Live(request, self.epoch))
        self.texts.append(tokens)

    def admit(self, which: int) -> None:
        live = self.waiting[which % len(self.waiting)]
        request = live.request
        live.epoch = self.epoch
        hot = self.cache.lookup_hot(request)
        expected = self._matching_hot(live)
        assert (hot is None) == (expected is None)
        if hot is not None:
            assert expected is not None
            self._take_hot(live, expected)
            return
        hit = self.lookup(live)
        if self.cache.num_free_slots and self.cache.num_free_pages_beside(hit):
            self.waiting.remove(live)
            self.cache.admit(request, hit)
            self.kept = [page for page in self.kept if page not in hit.pages]
            live.table, live.num_known = list(hit.pages), len(hit.pages)
            if len(self.running) + len(self.hot) == self.cache.num_slots:
                self._drop_oldest_hot(beside=live)
            self.running.append(live)
            request.cached = request.fed = hit.num_tokens
            request.prefill_end = len(request.tokens)
            if hit.snapshot is not None:
                restored = self.slot_rows[hit.snapshot.slot]
                assert restored == live.text(hit.num_tokens), "a snapshot of another text"
                self.slot_rows[request.slot] = restored
            self.seen["hit"] += bool(hit.num_tokens)

    def lookup(self, live: Live) -> Hit:
        """The manager's hit, after comparing it with a search from the longest prefix down."""
        cap = len(live.request.tokens) - (1 if self.exact else 0)
        hit = self.cache.lookup(live.request, cap)
        pages: list[int] = []
        for end in range(PAGE_SIZE, cap + 1, PAGE_SIZE):
            if live.text(end) not in self.index:
                break
            pages.append(self.index[live.text(end)])
        assert hit.num_indexed_tokens == len(pages) * PAGE_SIZE
        if self.exact:
            while pages and pages[-1] not in self.cache._snapshots:
                pages.pop()
            assert (hit.snapshot is not None) == bool(pages)
        assert list(hit.pages) == pages
        assert hit.num_tokens == len(pages) * PAGE_SIZE <= cap
        for position in range(hit.num_tokens):
            place = pages[position // PAGE_SIZE], position % PAGE_SIZE
            assert self.page_rows[place] == live.text(position + 1), "a page of another text"
        available = {*self.free, *self.kept} - set(pages)
        assert self.cache.num_free_pages_beside(hit) == len(available)
        return hit

    def step(
        self, which: int, num_rows: int, num_drafts: int, token: int, kind: int, *, lags: bool
    ) -> None:
        """Feed rows, sample when the text is used up, let drafts write garbage behind it.

        A step that lags is confirmed by a later one only.
        """
        live = self.running[which % len(self.running)]
        request = live.request
        end = min(request.fed + num_rows, len(request.tokens))
        if not self._grow(live, end):
            self.preempt(which)
            return
        for position in range(request.fed, end):
            self._write(live, position, live.text(position + 1))
        request.fed = end
        if end % PAGE_SIZE == 0 and kind < len(SnapshotKind) and self.exact:
            self._save(live, list(SnapshotKind)[kind])
        # Drafts are written, then rejected, and nothing of them may be found later.
        if self._grow(live, end + num_drafts):
            for position in range(end, end + num_drafts):
                self._write(live, position, (None, -1, (token, position)))
        if not lags:
            self._commit(live)
        if end == len(request.tokens):
            request.tokens.append(token)

    def _save(self, live: Live, kind: SnapshotKind) -> None:
        row = self.cache.save_snapshot(live.request, live.request.fed, kind)
        if row is not None:
            assert row > self.cache.num_slots
            self.slot_rows[row] = live.text(live.request.fed)
            self.seen["snapshot"] += 1

    def finish(self, which: int) -> None:
        live = self.running[which % len(self.running)]
        request = live.request
        self.texts.append(list(request.tokens))
        slot = request.slot
        session = (request.session_key or "", request.cache_salt)
        if not self.cache.keep_hot(request, request.fed):
            self._release(live)
            return
        if session in self.hot:
            self._release_table(self.hot.pop(session).table)
        elif len(self.hot) == self.cache._hot.capacity:
            self._drop_oldest_hot()
        self.running.remove(live)
        needed = -(-request.fed // PAGE_SIZE)
        self._release_table(live.table[needed:])
        del live.table[needed:]
        self.hot[session] = live
        self.slot_rows[slot] = live.text(request.fed)

    def preempt(self, which: int) -> None:
        live = self.running[which % len(self.running)]
        self._release(live)
        live.request.cached = live.request.fed = 0
        self.waiting.append(live)
        self.seen["preemption"] += 1

    def abort_waiting(self, which: int) -> None:
        self.cache.release(self.waiting.pop(which % len(self.waiting)).request)

    def reset(self) -> None:
        for session in list(self.hot):
            self._release_table(self.hot.pop(session).table)
        self.free.update(self.kept)
        self.kept.clear()
        self.index.clear()
        self.epoch += 1
        assert self.cache.reset_prefix_cache() == (not any(live.table for live in self.running))
        assert self.cache.num_snapshots == 0

    def finish_all(self) -> None:
        """End everything: no page, slot or snapshot row is left behind (invariant 3)."""
        while self.running:
            self._release(self.running[-1])
        self.waiting.clear()
        self.check()
        self.reset()
        self.check()
        assert self.cache.num_free_pages == self.cache.num_pages
        assert self.cache.num_free_slots == self.cache.num_slots

    def check(self) -> None:
        """Manager and model agree on every page."""
        self.cache.check_integrity([live.request for live in (*self.running, *self.waiting)])
        assert list(self.cache._pages.kept) == self.kept
        assert self.cache.num_free_pages == len(self.free) + len(self.kept)
        assert self.cache.num_hot_slots == len(self.hot)
        assert set(self.cache._index.pages) == set(self.index.values())
        for live in self.running:
            assert list(live.request.pages) == live.table

    # The model's own books.

    def _matching_hot(self, live: Live) -> Live | None:
        request = live.request
        hot = self.hot.get((request.session_key or "", request.cache_salt))
        if hot is None or len(request.tokens) <= hot.request.fed:
            return None
        text = hot.text(hot.request.fed)[2]
        return hot if text == tuple(request.tokens[: len(text)]) else None

    def _take_hot(self, live: Live, hot: Live) -> None:
        request = live.request
        found = self.cache.lookup_hot(request)
        assert found is not None
        self.waiting.remove(live)
        self.cache.take_hot(request, found)
        del self.hot[request.session_key or "", request.cache_salt]
        live.table, live.num_known = hot.table, hot.num_known
        self.running.append(live)
        request.fed = found.confirmed
        request.prefill_end = len(request.tokens)
        assert self.slot_rows[request.slot] == live.text(request.fed), "a slot of another text"
        self.seen["hot"] += 1

    def _grow(self, live: Live, end: int) -> bool:
        before = len(live.table)
        grown = self.cache.grow(live.request, end)
        missing = max(0, -(-end // PAGE_SIZE) - before)
        running = {page for other in self.running for page in other.table}
        hot = {page for other in self.hot.values() for page in other.table} - running
        if missing <= len(self.free) + len(self.kept) + len(hot):  # else it would not help
            while missing > len(self.free) + len(self.kept):
                self._drop_oldest_hot()
        assert grown == (missing <= len(self.free) + len(self.kept))
        new = list(live.request.pages[before:])
        assert len(new) == (missing if grown else 0)
        for page in new:
            if not self.free:
                self._evict()
            self.free.remove(page)
        live.table += new
        return grown

    def _evict(self) -> None:
        page = self.kept.pop(0)
        self.index = {text: p for text, p in self.index.items() if p != page}
        self.free.add(page)
        self.seen["eviction"] += 1

    def _write(self, live: Live, position: int, text: Text) -> None:
        page = live.table[position // PAGE_SIZE]
        assert page not in self.index.values(), "a write into an indexed page"
        holders = [other for other in (*self.running, *self.hot.values()) if page in other.table]
        assert holders == [live], "a write into a shared page"
        self.page_rows[page, position % PAGE_SIZE] = text

    def _commit(self, live: Live) -> None:
        self.cache.commit(live.request, live.request.fed)
        num_full = live.request.fed // PAGE_SIZE
        for i in range(live.num_known, num_full):
            self.index.setdefault(live.text((i + 1) * PAGE_SIZE), live.table[i])
        live.num_known = max(live.num_known, num_full)

    def _release(self, live: Live) -> None:
        self.cache.release(live.request)
        self.running.remove(live)
        self._release_table(live.table)
        live.table, live.num_known = [], 0

    def _release_table(self, table: list[int], beside: Live | None = None) -> None:
        """Deepest page first, those without another holder become the youngest kept or free."""
        holders = [*self.running, *self.hot.values()] + ([beside] if beside else [])
        held = {page for live in holders for page in live.table}
        indexed = set(self.index.values())
        for page in reversed(table):
            if page in indexed and page not in held:
                self.kept.append(page)
            elif page not in held:
                self.free.add(page)

    def _drop_oldest_hot(self, beside: Live | None = None) -> None:
        self._release_table(self.hot.pop(next(iter(self.hot))).table, beside)
