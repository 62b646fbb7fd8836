"""What is known about refused requests, and when it stops to be."""

from __future__ import annotations

from array import array

import pytest

from leadline.cache.refusals import Refusals
from leadline.core.request import Request, SamplingParams


def refused(name: str, *digests: bytes) -> Request:
    request = Request(name, array("i", [1]), 1, SamplingParams(), arrival=0.0)
    request.digests.extend(digests)
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
