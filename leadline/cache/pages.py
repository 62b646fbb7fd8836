"""Pages: which are free, which are kept for a prefix hit, how many holders each other one has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from leadline.core.errors import OutOfPages


class PageAllocator:
    """Reference counts over page ids ``1..num_pages - 1``; 0 is the null page and never handed out.

    A page is free, kept or held (invariant 1 of cache-and-scheduling 7). A kept page has no holder
    but is still indexed; ``evict`` takes the one that was released longest ago (2.6).
    """

    def __init__(self, num_pages: int) -> None:
        self._num_holders = [0] * num_pages
        # Popped from the end: low ids first, and a page freed last is warm and goes out first.
        self._free = list(range(num_pages - 1, 0, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def capacity(self) -> int:
        """Pages that can be held at once: all but the null page."""
        return len(self._num_holders) - 1

    @property
    def num_free(self) -> int:
        """Pages that ``allocate`` can hand out at once."""
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Pages that ``evict`` can turn into free ones."""
        return len(self._kept)

    @property
    def kept(self) -> Collection[int]:
        """The kept pages, in the order in which they would be evicted."""
        return self._kept.keys()

    def num_holders(self, page: int) -> int:
        return self._num_holders[page]

    def allocate(self) -> int:
        """Take a free page; its one holder is the caller.

        Raises:
            OutOfPages: none is free; kept ones may be left to evict.
        """
        if not self._free:
            raise OutOfPages(f"of {self.capacity} pages none is free and {self.num_kept} are kept")
        page = self._free.pop()
        self._num_holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a holder to a page that has one or is kept."""
        if not self._num_holders[page]:
            assert page in self._kept, f"page {page} is free; only a held or kept one can be shared"
            del self._kept[page]
        self._num_holders[page] += 1

    def release(self, page: int, *, keep: bool = False) -> None:
        """Drop one holder; after the last one the page is kept, as the youngest, or free."""
        assert self._num_holders[page] > 0, f"page {page} is released but nobody holds it"
        self._num_holders[page] -= 1
        if self._num_holders[page]:
            return
        if keep:
            self._kept[page] = None
        else:
            self._free.append(page)

    def evict(self) -> int:
        """Free the oldest kept page; who indexed it must forget it.

        Raises:
            OutOfPages: none is kept.
        """
        if not self._kept:
            raise OutOfPages(f"of {self.capacity} pages none is kept")
        page, _ = self._kept.popitem(last=False)
        self._free.append(page)
        return page

    def check_integrity(self) -> None:
        """Assert that free, kept and held pages make the whole, each page in exactly one state."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert free.isdisjoint(self._kept), (
            f"pages {sorted(free & self._kept.keys())} are also kept"
        )
        unheld = {page for page in range(1, self.capacity + 1) if not self._num_holders[page]}
        idle = free | self._kept.keys()
        assert idle == unheld, f"lists and holders disagree about pages {sorted(idle ^ unheld)}"
        assert not self._num_holders[0], "the null page is held"
