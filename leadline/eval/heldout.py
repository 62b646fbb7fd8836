"""Prose that no training has seen."""

from __future__ import annotations

import json
import random
import textwrap
from importlib.resources import files
from pathlib import Path

from leadline.core.errors import ConfigError
from leadline.eval.exercise import Passage

FILE = Path(str(files("leadline.eval"))) / "data" / "heldout.jsonl"
# About a thousand tokens of the bundled model.
PASSAGE_CHARACTERS = 3300


def passages(seed: str, count: int, *, file: Path = FILE) -> list[Passage]:
    """Passages of about equal length, no two alike: ``count`` of them, or all there are.

    Args:
        seed: decides which, and their order.
        count: how many.
        file: a JSON object a line, of whose keys ``text`` is read.

    Raises:
        ConfigError: the package was built without the file.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(
            f"{file} is missing, so there is no prose to measure; install the whole package, or "
            "name --families without prose"
        ) from None
    pieces = [piece for line in lines for piece in _pieces(json.loads(line)["text"])]
    random.Random(seed).shuffle(pieces)
    return [Passage("prose", piece) for piece in pieces[:count]]


def _pieces(text: str) -> list[str]:
    """Whole pieces of a document, cut between words; the rest is too short to compare."""
    pieces = textwrap.wrap(
        text,
        PASSAGE_CHARACTERS,
        replace_whitespace=False,
        expand_tabs=False,
        break_long_words=False,
    )
    return [piece for piece in pieces if len(piece) > PASSAGE_CHARACTERS // 2]
