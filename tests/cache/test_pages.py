from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from leadline.cache.pages import PageAllocator
from leadline.core.errors import OutOfPages

CAPACITY = 5


class PagesAgainstModel(RuleBasedStateMachine):
    """Any order of calls agrees with a plain count of holders per page."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(num_pages=CAPACITY + 1)
        self.holders: Counter[int] = Counter()

    @rule()
    def allocate(self) -> None:
        if len(self.holders) == CAPACITY:
            with pytest.raises(OutOfPages, match="of 5 pages none is free"):
                self.pages.allocate()
            return
        page = self.pages.allocate()
        assert 1 <= page <= CAPACITY
        assert page not in self.holders
        self.holders[page] = 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.holders)))
        self.pages.share(page)
        self.holders[page] += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.holders)))
        self.pages.release(page)
        self.holders[page] -= 1
        self.holders += Counter()  # drops pages that nobody holds

    @invariant()
    def free_and_held_make_the_whole(self) -> None:
        assert self.pages.num_free + len(self.holders) == CAPACITY
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
