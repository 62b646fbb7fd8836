from __future__ import annotations

import struct
from array import array
from hashlib import blake2b

import pytest

from leadline.cache.prefix import PrefixIndex, extend_digests, num_full_pages, root_digest

PAGE_SIZE = 4
ROOT = root_digest("model", "revision")


def chain(tokens: list[int], *, root: bytes = ROOT, **extras: bytes) -> list[bytes]:
    """Digests of all full pages; ``extras`` by name ``page0`` and so on."""
    digests: list[bytes] = []
    extend_digests(
        digests,
        array("i", tokens),
        len(tokens) // PAGE_SIZE,
        page_size=PAGE_SIZE,
        root=root,
        extras={int(name.removeprefix("page")): extra for name, extra in extras.items()},
    )
    return digests


def test_a_digest_is_that_of_the_one_before_the_ids_and_the_extra() -> None:
    def hashed(*parts: bytes) -> bytes:
        return blake2b(b"".join(parts), digest_size=16).digest()

    first = hashed(ROOT, struct.pack("<4i", 1, 2, 3, 4))
    second = hashed(first, struct.pack("<4i", 5, 6, 7, 129_279), b"image")
    assert chain([1, 2, 3, 4, 5, 6, 7, 129_279, 9], page1=b"image") == [first, second]


def test_a_chain_that_grows_is_that_of_the_whole_text_and_hashes_nothing_twice() -> None:
    tokens = array("i", range(23))
    digests: list[bytes] = []
    for num_pages in (0, 1, 1, 3, 5):
        before = list(digests)
        extend_digests(digests, tokens, num_pages, page_size=PAGE_SIZE, root=ROOT, extras={})
        assert len(digests) == num_pages
        assert all(new is old for new, old in zip(digests, before, strict=False))
    assert digests == chain(list(range(23)))


def test_a_text_can_grow_after_it_was_hashed() -> None:
    tokens = array("i", range(8))
    extend_digests([], tokens, 2, page_size=PAGE_SIZE, root=ROOT, extras={})
    tokens.append(8)  # a view left open would forbid it


@pytest.mark.parametrize(
    ("other", "num_common"),
    [
        (chain([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12]), 2),
        (chain([0, 1, 2, 3, 4, 5, 7, 6, 8, 9, 10, 11]), 1),
        (chain(list(range(12)), page1=b"image"), 1),
        (chain(list(range(12)), root=root_digest(ROOT, "salt")), 0),
    ],
    ids=["last id", "order of ids", "image", "salt"],
)
def test_a_difference_changes_its_page_and_every_later_one(
    other: list[bytes], num_common: int
) -> None:
    same = [mine == theirs for mine, theirs in zip(chain(list(range(12))), other, strict=True)]
    assert same == [True] * num_common + [False] * (3 - num_common)


def test_roots_differ_wherever_their_parts_do() -> None:
    lists = [(), ("",), ("ab",), ("a", "b"), ("", "ab"), ("ab", ""), ("b", "a"), (b"\0ab",)]
    assert len({root_digest(*parts) for parts in lists}) == len(lists)
    assert root_digest("é") == root_digest("é".encode())
    assert len(ROOT) == 16


@pytest.mark.parametrize(
    ("num_tokens", "num_pages"), [(0, 0), (255, 0), (256, 1), (257, 1), (511, 1), (512, 2)], ids=str
)
def test_a_boundary_needs_the_whole_page(num_tokens: int, num_pages: int) -> None:
    assert num_full_pages(num_tokens, 256) == num_pages


def test_a_match_ends_at_the_first_page_that_is_missing() -> None:
    digests = chain(list(range(16)))
    index = PrefixIndex()
    for page, digest in zip((5, 6, 7, 8), digests, strict=True):
        index.add(digest, page)
    assert index.match(digests, 4) == [5, 6, 7, 8]
    assert index.match(digests, 2) == [5, 6]
    index.forget(7)
    assert index.match(digests, 4) == [5, 6]
    assert 7 not in index
    index.check_integrity()


def test_the_first_page_of_a_digest_stays_in_the_index() -> None:
    index = PrefixIndex()
    index.add(b"digest", 1)
    index.add(b"digest", 2)
    assert (index.page_of(b"digest"), index.pages) == (1, (1,))
    index.check_integrity()
