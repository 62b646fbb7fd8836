"""WordNet's files -> definitions to read, and words to ask for."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from leadline.tools.train_tiny.glosses import Gloss
from leadline.tools.train_tiny.markup import Block

_FOLDER = "usr/share/wordnet"
_PARTS = ("noun", "verb", "adj", "adv")
_SYNSETS_PER_PAGE = 60
# Lexicographer files of things that one can touch: animals, artifacts, the body, food, natural
# objects, plants, substances.
_CONCRETE = {5, 6, 8, 13, 17, 20, 27}
_NUM_CORE = 300
_LONGEST_MEANING = 90  # characters


@dataclass(frozen=True, slots=True)
class Synset:
    """Words that share a meaning.

    Attributes:
        words: the synonyms, the usual one first.
        meaning: the definition.
        examples: sentences in which a word is used.
        lexicographer_file: number of the subject.
    """

    words: tuple[str, ...]
    meaning: str
    examples: tuple[str, ...]
    lexicographer_file: int


def _synsets(folder: Path, part: str) -> Iterator[tuple[str, Synset]]:
    """Offset and synset of each line of a data file."""
    for line in (folder / _FOLDER / f"data.{part}").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            continue  # the licence
        fields, _, gloss = line.partition(" | ")
        offset, file, _, count, *rest = fields.split(" ")
        words = rest[: 2 * int(count, 16) : 2]
        meaning, *others = re.split(r";\s*(?=\")", gloss.strip())
        examples = tuple(text.strip('" ') for text in others)
        names = tuple(re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words)
        yield offset, Synset(names, meaning.strip(" ;"), examples, int(file))


def definition_pages(folder: Path) -> Iterator[list[Block]]:
    """Definitions with their examples, a paragraph each; related ones share a page."""
    for part in _PARTS:
        synsets = (synset for _, synset in _synsets(folder, part))
        while page := list(itertools.islice(synsets, _SYNSETS_PER_PAGE)):
            yield [Block(_definition(synset)) for synset in page]


def _definition(synset: Synset) -> str:
    text = f"{', '.join(synset.words)}: {synset.meaning}."
    for example in synset.examples:
        text += f" {example[:1].upper()}{example[1:]}{'' if example[-1:] in '.!?' else '.'}"
    return text


def common_glosses(folder: Path, counts: Counter[str], *, most: int) -> list[Gloss]:
    """First meanings of the nouns that a text uses most.

    Args:
        folder: the unpacked package.
        counts: how often the text has each word.
        most: of glosses; the 300 most usual words for things are the core.
    """
    synsets = dict(_synsets(folder, "noun"))
    found: list[tuple[int, str, Synset]] = []
    for line in (folder / _FOLDER / "index.noun").read_text(encoding="utf-8").splitlines():
        word, *fields = line.split()
        synset = synsets.get(fields[-int(fields[1])]) if not line.startswith(" ") else None
        if synset is not None and _is_plain(word, synset):
            found.append((counts[word], word, synset))
    found.sort(key=lambda entry: (-entry[0], entry[1]))
    usual = found[:most]
    concrete = [word for _, word, synset in usual if synset.lexicographer_file in _CONCRETE]
    core = set(concrete[:_NUM_CORE])
    return [Gloss(word, synset.meaning, word in core) for _, word, synset in usual]


def _is_plain(word: str, synset: Synset) -> bool:
    """A word of its own whose meaning reads on behind "is"."""
    is_word = word.isascii() and word.isalpha() and len(word) > 2 and word in synset.words
    starts = ("a ", "an ", "the ", "any ", "one ", "something ", "someone ")
    return is_word and synset.meaning.startswith(starts) and len(synset.meaning) <= _LONGEST_MEANING
