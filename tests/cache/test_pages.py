from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from leadline.cache.pages import PageAllocator
from leadline.core.errors import OutOfPages

CAPACITY = 5


class PagesAgainstModel(RuleBasedStateMachine):
    """Any order of calls agrees with a plain count of holders and a list of kept pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(num_pages=CAPACITY + 1)
        self.holders: Counter[int] = Counter()
        self.kept: list[int] = []  # oldest first

    @rule()
    def allocate(self) -> None:
        if len(self.holders) + len(self.kept) == CAPACITY:
            with pytest.raises(OutOfPages, match="of 5 pages none is free"):
                self.pages.allocate()
            return
        page = self.pages.allocate()
        assert 1 <= page <= CAPACITY
        assert page not in self.holders
        assert page not in self.kept
        self.holders[page] = 1

    @precondition(lambda self: self.holders or self.kept)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted([*self.holders, *self.kept])))
        self.pages.share(page)
        self.holders[page] += 1
        self.kept = [other for other in self.kept if other != page]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        page = data.draw(st.sampled_from(sorted(self.holders)))
        self.pages.release(page, keep=keep)
        self.holders[page] -= 1
        self.holders += Counter()  # drops pages that nobody holds
        if keep and page not in self.holders:
            self.kept.append(page)

    @rule()
    def evict(self) -> None:
        if not self.kept:
            with pytest.raises(OutOfPages, match="of 5 pages none is kept"):
                self.pages.evict()
            return
        assert self.pages.evict() == self.kept.pop(0)

    @invariant()
    def free_kept_and_held_make_the_whole(self) -> None:
        assert self.pages.num_free + len(self.kept) + len(self.holders) == CAPACITY
        assert list(self.pages.kept) == self.kept
        assert self.pages.num_kept == len(self.kept)
        assert all(self.pages.num_holders(page) == n for page, n in self.holders.items())
        self.pages.check_integrity()


TestPages = PagesAgainstModel.TestCase


def test_a_page_is_not_released_more_often_than_held() -> None:
    pages = PageAllocator(num_pages=3)
    page = pages.allocate()
    pages.release(page)
    with pytest.raises(AssertionError, match=f"page {page} is released but nobody holds it"):
        pages.release(page)
    with pytest.raises(AssertionError, match="only a held or kept one can be shared"):
        pages.share(page)
