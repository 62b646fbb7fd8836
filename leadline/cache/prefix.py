"""Which pages hold which text: digests of full pages, and the index that finds pages by them.

A digest names everything that a page's records depend on: its own tokens, all tokens before them,
images, the tenant's salt, and how the engine computes and stores (cache-and-scheduling 2.1).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
# Strings and lengths in digests, so that no two lists of parts read the same.
_LENGTH_BYTES = 8


def root_digest(*parts: str | bytes) -> bytes:
    """The 16 bytes that a chain starts from; different lists of parts give different ones.

    An engine's parts are model id and revision, record formats, page size and the numerics tag
    (exact or replay); a request's are its engine's root and its cache salt.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(_LENGTH_BYTES, "little"))
        digest.update(content)
    return digest.digest()


def num_full_pages(num_tokens: int, page_size: int) -> int:
    """Pages whose every position lies below ``num_tokens``.

    Commit, lookup and snapshots all take their boundaries from here, so that what one side keeps
    is what the other looks for (2.7).
    """
    return num_tokens // page_size


def extend_digests(
    digests: list[bytes],
    tokens: array[int],
    num_pages: int,
    *,
    page_size: int,
    root: bytes,
    extras: Mapping[int, bytes],
) -> None:
    """Append digests until there are ``num_pages``: ``blake2b-128(previous | tokens | extra)``.

    Nothing is hashed twice, so calling it again for the same pages costs nothing. ``tokens`` are
    32-bit ids, as many as ``num_pages`` need; ``root`` stands before the first page; ``extras``
    gives, by page index, what ids do not say: hashes and offsets of images.
    """
    assert num_pages * page_size <= len(tokens), f"{num_pages} pages of {len(tokens)} tokens"
    with memoryview(tokens).cast("B") as content:
        page_bytes = page_size * tokens.itemsize
        for i in range(len(digests), num_pages):
            digest = blake2b(digests[-1] if digests else root, digest_size=DIGEST_BYTES)
            digest.update(content[i * page_bytes : (i + 1) * page_bytes])
            digest.update(extras.get(i, b""))
            digests.append(digest.digest())


class PrefixIndex:
    """Digest -> page and back; each digest and each page at most once."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._digest_of

    @property
    def pages(self) -> tuple[int, ...]:
        """Every indexed page."""
        return tuple(self._digest_of)

    def page_of(self, digest: bytes) -> int | None:
        return self._page_of.get(digest)

    def digest_of(self, page: int) -> bytes | None:
        return self._digest_of.get(page)

    def match(self, digests: Sequence[bytes], num_pages: int) -> list[int]:
        """Pages of the longest indexed prefix of a chain, ``num_pages`` at most (2.4)."""
        pages: list[int] = []
        for i in range(num_pages):
            page = self._page_of.get(digests[i])
            if page is None:
                break
            pages.append(page)
        return pages

    def add(self, digest: bytes, page: int) -> None:
        """Index a page; where the digest is known already, its first page stays (2.5)."""
        assert page not in self._digest_of, f"page {page} is indexed twice"
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def forget(self, page: int) -> None:
        """Let no later lookup find the page."""
        del self._page_of[self._digest_of.pop(page)]

    def check_integrity(self) -> None:
        """Assert that both directions agree."""
        found = {page: digest for digest, page in self._page_of.items()}
        assert found == self._digest_of, "digests and pages of the prefix index disagree"
