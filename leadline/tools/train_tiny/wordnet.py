"""WordNet's files -> definitions to read, and words to ask for."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from leadline.eval.tasks import words
from leadline.tools.train_tiny.glosses import Gloss
from leadline.tools.train_tiny.markup import Block

_FOLDER = "usr/share/wordnet"
_PARTS = ("noun", "verb", "adj", "adv")
_SYNSETS_PER_PAGE = 60
# Numbers of WordNet's subjects: animals, artifacts, parts of the body, natural objects, people and
# plants are counted.
_COUNTABLE = {5, 6, 8, 17, 18, 20}
# Everyday words, and the subjects in which they mean what one thinks of: tools before animals,
# animals before food, plants for food, substances for materials.
_CORE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(words.MATERIALS, (27, 6, 20)),
    **dict.fromkeys(words.FOODS, (13, 20)),
    **dict.fromkeys(words.ANIMALS, (5,)),
    **dict.fromkeys(words.OBJECTS, (6,)),
}
_ARTICLES = ("a ", "an ", "the ", "any ", "one ", "something ", "someone ")
_LONGEST_MEANING = 120  # characters


@dataclass(frozen=True, slots=True)
class Synset:
    """Words that share a meaning.

    Attributes:
        words: the synonyms, the usual one first.
        meaning: the definition.
        examples: sentences in which a word is used.
        subject: number of the lexicographers' file.
    """

    words: tuple[str, ...]
    meaning: str
    examples: tuple[str, ...]
    subject: int


def _synsets(folder: Path, part: str) -> Iterator[tuple[str, Synset]]:
    """Offset and synset of each line of a data file."""
    for line in _lines(folder, f"data.{part}"):
        fields, _, gloss = line.partition(" | ")
        offset, subject, _, count, *rest = fields.split(" ")
        words = rest[: 2 * int(count, 16) : 2]
        meaning, *others = re.split(r";\s*(?=\")", gloss.strip())
        examples = tuple(text.strip('" ') for text in others)
        names = tuple(re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words)
        yield offset, Synset(names, meaning.strip(" ;"), examples, int(subject))


def definition_pages(folder: Path) -> Iterator[list[Block]]:
    """Definitions with their examples, a paragraph each; related ones share a page.

    Names are left out: a third of the file is the families and genera of all that lives.
    """
    for part in _PARTS:
        synsets = (synset for _, synset in _synsets(folder, part) if synset.words[0].islower())
        while page := list(itertools.islice(synsets, _SYNSETS_PER_PAGE)):
            yield [Block(_definition(synset)) for synset in page]


def _definition(synset: Synset) -> str:
    text = f"{', '.join(synset.words)}: {synset.meaning}."
    for example in synset.examples:
        text += f" {example[:1].upper()}{example[1:]}{'' if example[-1:] in '.!?' else '.'}"
    return text


def common_glosses(folder: Path, *, most: int) -> list[Gloss]:
    """First meanings of the words that are used most as nouns, in the texts that WordNet counted.

    Args:
        folder: the unpacked package.
        most: of glosses; those of the things that exercises are about come first, as the core.
    """
    synsets = dict(_synsets(folder, "noun"))
    counts = _noun_counts(folder)
    found: list[tuple[int, Gloss]] = []
    for line in _lines(folder, "index.noun"):
        word, *fields = line.split()
        # As many offsets as meanings, the usual one first.
        meanings = [synsets[offset] for offset in fields[-int(fields[1]) :]]
        if word in _CORE:
            meanings = [synset for synset in meanings if synset.subject in _CORE[word]]
        if meanings and _is_plain(word, meanings[0]):
            gloss = Gloss(_name(word, meanings[0]), _phrase(meanings[0]), word in _CORE)
            found.append((counts[word], gloss))
    found.sort(key=lambda entry: (not entry[1].is_core, -entry[0], entry[1].name))
    return [gloss for _, gloss in found[:most]]


def _name(word: str, synset: Synset) -> str:
    is_counted = synset.subject in _COUNTABLE and word not in words.MATERIALS
    return _with_article(word) if is_counted else word


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _phrase(synset: Synset) -> str:
    """The definition up to its first remark, with an article."""
    phrase = re.sub(r" ?\([^)]*\)", "", synset.meaning).split("; ")[0].strip()
    return phrase if phrase.startswith(_ARTICLES) else _with_article(phrase)


def _noun_counts(folder: Path) -> Counter[str]:
    """How much more often each word was met as a noun than as anything else."""
    counts: Counter[str] = Counter()
    for line in _lines(folder, "cntlist.rev"):
        key, _, count = line.split()
        word, _, sense = key.partition("%")
        counts[word] += int(count) if sense.startswith("1:") else -int(count)
    return counts


def _lines(folder: Path, name: str) -> list[str]:
    """Lines of a file behind the licence on its top."""
    lines = (folder / _FOLDER / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith(" ")]


def _is_plain(word: str, synset: Synset) -> bool:
    """A word of its own whose meaning reads on behind "is"."""
    is_word = word.isascii() and word.isalpha() and len(word) > 2 and word in synset.words
    has_article = word in _CORE or synset.meaning.startswith(_ARTICLES)
    return is_word and has_article and len(_phrase(synset)) <= _LONGEST_MEANING
