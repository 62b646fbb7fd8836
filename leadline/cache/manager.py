"""``CacheManager``: the one class that the scheduler talks to about memory.

Only this class changes a request's ``pages`` and ``slot``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from leadline.cache.pages import PageAllocator
from leadline.cache.sizing import CacheSize, pages_of
from leadline.cache.slots import SlotAllocator
from leadline.core.request import Request


class CacheManager:
    """Gives pages and slots to requests, takes them back, and can prove its books.

    A request holds one slot from admission to its end and ``ceil(positions / page_size)`` pages.

    Attributes:
        page_size: token positions of a page.
    """

    def __init__(self, size: CacheSize) -> None:
        self.page_size = size.page_size
        self._pages = PageAllocator(size.num_pages)
        self._slots = SlotAllocator(size.num_slots)

    @property
    def num_pages(self) -> int:
        """Pages that requests can hold, the null page not counted."""
        return self._pages.capacity

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free

    @property
    def num_slots(self) -> int:
        """Requests that can run at once, the padding slot not counted."""
        return self._slots.capacity

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free

    def pages_of(self, num_tokens: int) -> int:
        """Pages that hold the first ``num_tokens`` positions of a request."""
        return pages_of(num_tokens, self.page_size)

    def take_slot(self, request: Request) -> None:
        """Give the request its slot.

        Raises:
            OutOfSlots: none is free.
        """
        assert not request.slot, f"request {request.request_id} already has slot {request.slot}"
        request.slot = self._slots.allocate()

    def grow(self, request: Request, end: int) -> bool:
        """Let the request's pages cover positions ``[0, end)``; all of it or nothing.

        Returns:
            Whether they do now; False when too few pages are free.
        """
        missing = self.pages_of(end) - len(request.pages)
        if missing > self._pages.num_free:
            return False
        for _ in range(missing):
            request.pages.append(self._pages.allocate())
        return True

    def release(self, request: Request) -> None:
        """Take back everything the request holds, its last page first."""
        while request.pages:
            self._pages.release(request.pages.pop())
        if request.slot:
            self._slots.release(request.slot)
            request.slot = 0

    def check_integrity(self, live: Collection[Request]) -> None:
        """Assert invariants 1, 2 and 4 to 6 of cache-and-scheduling 7.

        Args:
            live: every request of the engine, waiting ones included.
        """
        self._pages.check_integrity()
        holders = Counter(page for request in live for page in request.pages)
        for page in range(1, self._pages.capacity + 1):
            known, found = self._pages.num_holders(page), holders[page]
            assert known == found, f"page {page} counts {known} holders, {found} tables name it"
        assert not holders[0], "the null page is in a live request's table"
        self._slots.check_integrity([request.slot for request in live if request.slot])
        for request in live:
            name, pages = request.request_id, request.pages
            assert len(set(pages)) == len(pages), f"request {name} has a page twice"
            assert bool(pages) <= bool(request.slot), f"request {name} has pages and no slot"
            needed = self.pages_of(max(request.cached, request.fed))
            assert len(pages) == needed, (
                f"request {name} holds {len(pages)} pages; {request.fed} positions of "
                f"{self.page_size} a page need {needed}"
            )
