from __future__ import annotations

from array import array

import pytest

from leadline.cache.manager import CacheManager
from leadline.cache.sizing import CacheSize
from leadline.core.request import Request, SamplingParams


def make(request_id: str = "a") -> Request:
    return Request(request_id, array("i", [5]), 1, SamplingParams(), arrival=0.0)


@pytest.fixture
def cache() -> CacheManager:
    return CacheManager(CacheSize(num_pages=5, num_slots=3, page_size=256))


@pytest.fixture
def running(cache: CacheManager) -> Request:
    """A request with a slot and two pages."""
    request = make()
    cache.take_slot(request)
    request.fed = 300
    assert cache.grow(request, 300)
    return request


def test_pages_follow_positions_and_all_come_back(cache: CacheManager, running: Request) -> None:
    assert (len(running.pages), cache.num_free_pages, cache.num_free_slots) == (2, 2, 1)
    cache.check_integrity([running])
    running.fed = 0
    cache.release(running)
    assert (len(running.pages), running.slot) == (0, 0)
    assert (cache.num_free_pages, cache.num_free_slots) == (4, 2)
    cache.check_integrity([running])


def test_grow_takes_all_or_nothing(cache: CacheManager, running: Request) -> None:
    assert not cache.grow(running, 5 * 256)
    assert len(running.pages) == 2
    assert cache.grow(running, 4 * 256)
    assert len(running.pages) == 4


def test_a_waiting_request_holds_nothing_and_releases_nothing(cache: CacheManager) -> None:
    cache.release(make())
    assert (cache.num_free_pages, cache.num_free_slots) == (4, 2)


def test_integrity_finds_a_page_in_two_tables(cache: CacheManager, running: Request) -> None:
    other = make("b")
    cache.take_slot(other)
    other.pages, other.fed = array("i", running.pages[:1]), 1
    with pytest.raises(AssertionError, match="counts 1 holders, 2 tables name it"):
        cache.check_integrity([running, other])


def test_integrity_finds_leaked_pages(cache: CacheManager, running: Request) -> None:
    with pytest.raises(AssertionError, match="counts 1 holders, 0 tables name it"):
        cache.check_integrity([])


def test_integrity_finds_a_leaked_slot(cache: CacheManager, running: Request) -> None:
    running.slot = 0
    with pytest.raises(AssertionError, match="slots free or owned"):
        cache.check_integrity([running])


@pytest.mark.parametrize("fed", [200, 513], ids=["one too many", "one too few"])
def test_integrity_finds_a_wrong_number_of_pages(
    cache: CacheManager, running: Request, fed: int
) -> None:
    running.fed = fed
    with pytest.raises(AssertionError, match="request a holds 2 pages"):
        cache.check_integrity([running])
