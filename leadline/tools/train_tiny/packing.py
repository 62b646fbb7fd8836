"""Documents into rows of one length, with little padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leadline.tools.train_tiny.documents import Document, Ids, Weights

# Rows are filled from so many waiting documents: enough for one that fits nearly any gap.
POOL_SIZE = 64


@dataclass(frozen=True, slots=True)
class PackedRows:
    """B rows of S tokens as they cross processes; ``Batch`` says what the fields mean.

    Attributes:
        ids: ``[B, S]`` uint16.
        first: ``[B, S]`` int32.
        weights: ``[B, S]`` float32.
    """

    ids: Ids
    first: npt.NDArray[np.int32]
    weights: Weights


def pack(
    documents: Iterator[Document], *, rows: int, length: int, alignment: int, pad: int
) -> Iterator[PackedRows]:
    """Fill batch after batch; ends with the documents, dropping a last batch that is not full.

    The document that waited longest begins a row, so none waits forever; then the longest that
    fits is added until none does. No document may be longer than ``length``.

    Args:
        documents: drawn as they are needed.
        rows: B.
        length: S.
        alignment: documents start at its multiples.
        pad: id of padding.
    """
    pool: list[Document] = []
    while True:
        ids = np.full((rows, length), pad, np.uint16)
        first = np.zeros((rows, length), np.int32)
        weights = np.zeros((rows, length), np.float32)
        for row in range(rows):
            at = 0
            while at < length:
                _refill(pool, documents)
                document = _take(pool, length - at, is_first=at == 0)
                if document is None:
                    break
                end = at + len(document)
                ids[row, at:end] = document.ids
                weights[row, at:end] = document.weights
                first[row, at:] = at
                at = -(-end // alignment) * alignment
            if at == 0:
                return
        yield PackedRows(ids, first, weights)


def _refill(pool: list[Document], documents: Iterator[Document]) -> None:
    while len(pool) < POOL_SIZE:
        document = next(documents, None)
        if document is None:
            return
        pool.append(document)


def _take(pool: list[Document], room: int, *, is_first: bool) -> Document | None:
    if is_first:
        return pool.pop(0) if pool else None
    fitting = [i for i, document in enumerate(pool) if len(document) <= room]
    if not fitting:
        return None
    return pool.pop(max(fitting, key=lambda i: len(pool[i])))
