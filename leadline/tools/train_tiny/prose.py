"""Encoded text on disk: one array of ids, mapped rather than read, and where documents end."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from leadline.core.errors import ConfigError
from leadline.tools.train_tiny.documents import Ids


class Prose:
    """Documents of one folder and name, to draw pieces from.

    Attributes:
        ids: ``[tokens]`` uint16, document behind document, each with its end of sentence.
        ends: ``[documents]`` int64, where each ends.

    Raises:
        ConfigError: the files are missing.
    """

    def __init__(self, folder: Path, name: str) -> None:
        files = _files(folder, name)
        for file in files:
            if not file.exists():
                raise ConfigError(
                    f"{file} is missing; `python -m leadline.tools.train_tiny data` writes it"
                )
        self.ids: Ids = np.load(files[0], mmap_mode="r")
        self.ends: npt.NDArray[np.int64] = np.load(files[1])

    def document(self, index: int) -> Ids:
        """One document whole."""
        start = self.ends[index - 1] if index else 0
        return self.ids[start : self.ends[index]]

    def piece(self, rng: random.Random, size: int) -> Ids:
        """A document, or ``size`` tokens of one that is longer; every token is as likely."""
        at = rng.randrange(len(self.ids))
        document = self.document(int(np.searchsorted(self.ends, at, side="right")))
        start = rng.randrange(max(1, len(document) - size + 1))
        return document[start : start + size]


def write_prose(folder: Path, name: str, documents: Iterable[Ids]) -> None:
    """Store documents for ``Prose`` to read."""
    kept = list(documents)
    ends = np.cumsum([len(document) for document in kept], dtype=np.int64)
    ids_file, ends_file = _files(folder, name)
    np.save(ids_file, np.concatenate(kept))
    np.save(ends_file, ends)


def _files(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.npy", folder / f"{name}_ends.npy"
