"""What training reads: families by their share of the tokens, as an endless stream of rows."""

from __future__ import annotations

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

# So many drawings in a row that do not fit a row are a mistake in the mixture's sizes.
_MOST_MISFITS = 100


@dataclass(frozen=True, slots=True)
class Part:
    """A family's part in a mixture.

    Attributes:
        share: of all tokens, relative to the other parts.
        sizes: shortest and longest in tokens; drawn so that every doubling is as likely.
    """

    share: float
    sizes: tuple[int, int]

    def draw_size(self, rng: random.Random) -> int:
        """A size between the two."""
        low, high = self.sizes
        return round(low * (high / low) ** rng.random())


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
        longest: prose is cut to it, exercises are drawn again.

    Raises:
        ConfigError: exercises of a family never fit.
    """
    drawn = dict.fromkeys(mixture, 0)
    count = misfits = 0
    while True:
        family = min(mixture, key=lambda name: drawn[name] / mixture[name].share)
        rng = random.Random(f"{seed}/{count}")
        count += 1
        size = min(longest, mixture[family].draw_size(rng))
        document = data.draw(family, rng, size)
        if len(document) > longest:
            misfits += 1
            if misfits == _MOST_MISFITS:
                raise ConfigError(
                    f"{misfits} exercises of family {family!r} in a row are longer than the rows "
                    f"of {longest} tokens; lower its sizes {mixture[family].sizes}"
                )
            continue
        misfits = 0
        drawn[family] += len(document)
        yield document


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
