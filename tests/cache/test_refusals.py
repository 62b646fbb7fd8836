"""What is known about refused requests, and when it stops to be."""

from __future__ import annotations

from array import array

import pytest

from leadline.cache.manager import CacheManager
from leadline.cache.refusals import Refusals
from leadline.cache.sizing import CacheSize
from leadline.core.request import Request, SamplingParams, SnapshotKind

TEXT = tuple(range(8))  # two pages


def make_request(name: str, text: tuple[int, ...] = TEXT) -> Request:
    return Request(name, array("i", text), len(text), SamplingParams(), arrival=0.0)


def refused(name: str, *digests: bytes) -> Request:
    request = make_request(name)
    request.digests.extend(digests)
    return request


def make_cache(*, needs_snapshot: bool = False, hot_slots: int = 0) -> CacheManager:
    size = CacheSize(num_pages=20, num_slots=6, page_size=4, num_snapshots=2)
    return CacheManager(
        size, enable_prefix_caching=True, needs_snapshot=needs_snapshot, hot_slots=hot_slots
    )


def admit(cache: CacheManager, request: Request) -> Request:
    """Start a request with what is cached, and give it all its pages."""
    cache.admit(request, cache.lookup(request, len(request.tokens)))
    assert cache.grow(request, len(request.tokens))
    return request


def refuse(cache: CacheManager, request: Request) -> Request:
    """Refuse a request that needs five pages beside its hit."""
    cache.refuse(request, cache.lookup(request, len(request.tokens)), 5)
    return request


@pytest.fixture
def refusals() -> Refusals:
    return Refusals()


def test_a_note_is_good_while_its_own_prefix_does_not_grow(refusals: Refusals) -> None:
    request = refused("a", b"1", b"2")
    refusals.note(request, 7)
    refusals.prefix_grew(b"3")
    assert refusals.needed(request) == 7
    refusals.prefix_grew(b"2")
    assert refusals.needed(request) == 0


def test_requests_of_one_prefix_are_looked_up_again_together(refusals: Refusals) -> None:
    first, second = refused("a", b"1", b"2"), refused("b", b"1", b"3")
    refusals.note(first, 7)
    refusals.note(second, 8)
    refusals.prefix_grew(b"3")
    assert refusals.needed(first) == refusals.needed(second) == 0


def test_nothing_is_known_of_a_request_that_waits_no_longer(refusals: Refusals) -> None:
    first, second = refused("a", b"1"), refused("b", b"2")
    refusals.note(first, 7)
    refusals.note(second, 8)
    refusals.drop(first)
    assert refusals.needed(first) == 0
    assert refusals.needed(second) == 8


def test_pages_that_a_hit_would_pin_are_needed_too() -> None:
    cache = make_cache()
    other = admit(cache, make_request("other"))
    cache.commit(other, 8)
    held = refuse(cache, make_request("a"))
    cache.release(other)
    kept = refuse(cache, make_request("b"))
    assert (cache.num_needed(held), cache.num_needed(kept)) == (5, 7)


def test_a_note_ends_when_a_page_of_the_prefix_is_committed() -> None:
    cache = make_cache()
    other, stranger = (admit(cache, make_request(n, t)) for n, t in (("x", TEXT), ("y", TEXT[1:])))
    waiting = refuse(cache, make_request("a"))
    cache.commit(stranger, 4)
    assert cache.num_needed(waiting) == 5
    cache.commit(other, 4)
    assert cache.num_needed(waiting) == 0


def test_a_note_ends_when_a_kept_page_of_the_prefix_is_held_again() -> None:
    cache = make_cache()
    other = admit(cache, make_request("other"))
    cache.commit(other, 8)
    cache.release(other)
    waiting = refuse(cache, make_request("a"))
    admit(cache, make_request("b"))
    assert cache.num_needed(waiting) == 0


def test_a_note_ends_when_a_page_of_the_prefix_gets_its_snapshot() -> None:
    cache = make_cache(needs_snapshot=True)
    other = admit(cache, make_request("other"))
    cache.commit(other, 8)
    waiting = refuse(cache, make_request("a"))
    assert cache.save_snapshot(other, 8, SnapshotKind.TURN_END) is not None
    assert cache.num_needed(waiting) == 5
    cache.release(other)
    assert cache.num_needed(waiting) == 0


def test_a_note_ends_when_a_slot_stays_hot() -> None:
    cache = make_cache(hot_slots=1)
    other = admit(cache, make_request("other"))
    other.session_key = "session"
    waiting = refuse(cache, make_request("a", TEXT[1:]))
    assert cache.keep_hot(other, 8)
    assert cache.num_needed(waiting) == 0
    assert cache.num_needed(refuse(cache, waiting)) == 0  # what can be had is not known


def test_a_note_ends_when_the_cache_is_reset() -> None:
    cache = make_cache()
    waiting = refuse(cache, make_request("a"))
    cache.reset_prefix_cache()
    assert cache.num_needed(waiting) == 0


def test_a_note_ends_when_the_request_is_aborted() -> None:
    cache = make_cache()
    waiting = refuse(cache, make_request("a"))
    cache.release(waiting)
    assert cache.num_needed(waiting) == 0
