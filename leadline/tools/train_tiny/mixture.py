"""What training reads: families by their share of the tokens, as an endless stream of rows."""

from __future__ import annotations

import itertools
import os
import random
import signal
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

from leadline.core.errors import ConfigError
from leadline.tools.train_tiny.dataset import DataSet
from leadline.tools.train_tiny.documents import Document
from leadline.tools.train_tiny.packing import PackedRows, pack

# An exercise that is too long is drawn again, shorter; so often in a row, it has no shorter form.
_MOST_MISFITS = 50
_SHORTER = 0.9


@dataclass(frozen=True, slots=True)
class Part:
    """A family's part in a mixture.

    Attributes:
        share: of all tokens, relative to the other parts.
        sizes: shortest and longest in tokens; drawn so that every doubling is as likely.
    """

    share: float
    sizes: tuple[int, int]

    def draw_size(self, rng: random.Random, longest: int) -> float:
        """A size between the two, and not above ``longest``."""
        low, high = (min(size, longest) for size in self.sizes)
        return float(low * (high / low) ** rng.random())


Mixture: TypeAlias = Mapping[str, Part]


@dataclass(frozen=True, slots=True)
class Stream:
    """An endless stream of batches; the same fields give the same batches.

    Attributes:
        folder: what ``data`` wrote.
        mixture: family -> its part.
        rows: B of each batch.
        length: S.
        seed: of everything that is drawn.
        alignment: at whose multiples documents start: the ratios' least common multiple.
    """

    folder: Path
    mixture: Mixture
    rows: int
    length: int
    seed: int = 0
    alignment: int = 2


def draw_documents(
    data: DataSet, mixture: Mixture, *, seed: str, longest: int
) -> Iterator[Document]:
    """Documents without end, the family that lags most behind its share next.

    Args:
        data: where documents come from.
        mixture: what is wanted.
        seed: of this sequence; evaluation uses other ones.
        longest: what does not fit is drawn again, shorter.

    Raises:
        ConfigError: exercises of a family never fit.
    """
    drawn = dict.fromkeys(mixture, 0)
    for count in itertools.count():
        family = min(mixture, key=lambda name: drawn[name] / mixture[name].share)
        rng = random.Random(f"{seed}/{count}")
        size = mixture[family].draw_size(rng, longest)
        document = _fitting(data, family, rng, size, longest=longest)
        drawn[family] += len(document)
        yield document


def _fitting(
    data: DataSet, family: str, rng: random.Random, size: float, *, longest: int
) -> Document:
    for _ in range(_MOST_MISFITS):
        document = data.draw(family, rng, round(size))
        if len(document) <= longest:
            return document
        size *= _SHORTER * longest / len(document)
    raise ConfigError(
        f"exercises of family {family!r} are longer than rows of {longest} tokens; leave it out of "
        "the mixture, or lengthen the rows"
    )


def packed_batches(stream: Stream, worker: int = 0) -> Iterator[PackedRows]:
    """The part of a stream that one worker makes."""
    data = DataSet(stream.folder)
    documents = draw_documents(
        data, stream.mixture, seed=f"train/{stream.seed}/{worker}", longest=stream.length
    )
    return pack(
        documents,
        rows=stream.rows,
        length=stream.length,
        alignment=stream.alignment,
        pad=data.pad,
    )


def work(connection: Connection, stream: Stream, worker: int) -> None:
    """Send batches until nobody listens; of a failure, its traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    try:
        for batch in packed_batches(stream, worker):
            connection.send(batch)
    except BrokenPipeError:
        return
    except Exception:
        connection.send(traceback.format_exc())
