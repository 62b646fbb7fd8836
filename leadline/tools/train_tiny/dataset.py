"""A data folder opened: documents of every family, drawn by a random generator."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from leadline.core.errors import ConfigError
from leadline.eval.tasks import FAMILIES, Family
from leadline.eval.tasks import filler as invented_filler
from leadline.text.encoding import ChatEncoder
from leadline.text.tokenizer import Tokenizer
from leadline.tools.train_tiny.documents import Document, DocumentEncoder, prose_document
from leadline.tools.train_tiny.glosses import gloss_family, read_glosses
from leadline.tools.train_tiny.prose import Prose
from leadline.tools.train_tiny.tokenizer import PAD

PROSE = "prose"


class DataSet:
    """Draws documents.

    Attributes:
        tokenizer: the folder's.
        families: names that ``draw`` knows: prose, and every generator.

    Raises:
        ConfigError: the folder lacks a file.
    """

    def __init__(self, folder: Path, *, prose: str = "train") -> None:
        """Open ``folder``; ``prose`` is the part to draw from: ``train`` or ``heldout``."""
        self.tokenizer = Tokenizer(folder / "tokenizer.json")
        self._prose = Prose(folder, prose)
        self._encoder = DocumentEncoder(ChatEncoder(self.tokenizer))
        glosses = gloss_family(read_glosses(folder))
        self._generators: Mapping[str, Family] = {**FAMILIES, glosses.name: glosses}
        self.families = (PROSE, *self._generators)

    @property
    def pad(self) -> int:
        """Id of padding."""
        return self.tokenizer.marker_id(PAD)

    def draw(self, family: str, rng: random.Random, size: int) -> Document:
        """A document of about ``size`` tokens; of prose never more."""
        if family == PROSE:
            return prose_document(self._prose.piece(rng, size - 1), bos=self._encoder.bos)
        generator = self._generators.get(family)
        if generator is None:
            raise ConfigError(
                f"the mixture names family {family!r}; choose among {', '.join(self.families)}"
            )
        make = (
            partial(generator.make, filler=self.filler) if generator.has_filler else generator.make
        )
        return self._encoder.encode(make(rng, size))

    def filler(self, rng: random.Random, size: int) -> str:
        """Text of about ``size`` tokens to hide facts in: of the corpus, or without meaning."""
        if rng.random() < 0.5:
            return invented_filler(rng, size)
        pieces = []
        while size > 0:
            ids = self._prose.piece(rng, size)
            size -= len(ids)
            text = self.tokenizer.decode(ids[ids != self._encoder.eos].tolist())
            # The ends may be cut within a word, even within a character.
            pieces.append(text.partition(" ")[2].rpartition(" ")[0])
        return "\n\n".join(pieces)
