"""Pages: which are free and how many holders each of the others has."""

from __future__ import annotations

from leadline.core.errors import OutOfPages


class PageAllocator:
    """Reference counts over page ids ``1..num_pages - 1``; 0 is the null page and never handed out.

    A page is free or referenced (cache-and-scheduling 7.1); the last release frees it.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_holders = [0] * num_pages
        # Popped from the end: low ids first, and a page freed last is warm and goes out first.
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def capacity(self) -> int:
        """Pages that can be held at once: all but the null page."""
        return len(self._num_holders) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_holders(self, page: int) -> int:
        return self._num_holders[page]

    def allocate(self) -> int:
        """Take a free page; its one holder is the caller.

        Raises:
            OutOfPages: none is free.
        """
        if not self._free:
            raise OutOfPages(f"all {self.capacity} pages are held")
        page = self._free.pop()
        self._num_holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a holder to a page that already has one."""
        assert self._num_holders[page] > 0, f"page {page} is free; only a held page can be shared"
        self._num_holders[page] += 1

    def release(self, page: int) -> None:
        """Drop one holder; the last one frees the page."""
        assert self._num_holders[page] > 0, f"page {page} is released but nobody holds it"
        self._num_holders[page] -= 1
        if not self._num_holders[page]:
            self._free.append(page)

    def check_integrity(self) -> None:
        """Assert that free and held pages make the whole, each page in exactly one state."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        unheld = {page for page in range(1, self.capacity + 1) if not self._num_holders[page]}
        assert free == unheld, f"free list and holders disagree about pages {sorted(free ^ unheld)}"
        assert not self._num_holders[0], "the null page is held"
