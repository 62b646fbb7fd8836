"""Batches: whole documents in aligned places, families in their shares, the same for a seed."""

from __future__ import annotations

import collections
import itertools
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leadline.core.errors import ConfigError
from leadline.tools.train_tiny.batch import Batch
from leadline.tools.train_tiny.batches import BatchLoader, WorkerError, heldout_batches
from leadline.tools.train_tiny.dataset import DataSet
from leadline.tools.train_tiny.documents import Document
from leadline.tools.train_tiny.mixture import Part, Stream, draw_documents, packed_batches
from leadline.tools.train_tiny.packing import PackedRows, pack

ROOT = Path(__file__).parents[3]
PAD = 2
MIXTURE = {
    "prose": Part(50, (64, 512)),
    "recall": Part(30, (128, 300)),
    "word_problem": Part(20, (60, 200)),
}


def numbered(lengths: list[int]) -> Iterator[Document]:
    """Documents whose tokens all say which one it is."""
    for i, length in enumerate(lengths):
        weights = np.ones(length, np.float32)
        weights[0] = 0
        yield Document(np.full(length, 100 + i, np.uint16), weights)


def documents_of(rows: PackedRows) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Start, ids and weights of each document with its padding."""
    found = []
    for ids, first, weights in zip(rows.ids, rows.first, rows.weights, strict=True):
        for start in np.unique(first):
            inside = first == start
            found.append((int(start), ids[inside], weights[inside]))
    return found


class TestPacking:
    @given(
        lengths=st.lists(st.integers(2, 32), min_size=1, max_size=60),
        rows=st.integers(1, 3),
        alignment=st.sampled_from([1, 2, 4]),
    )
    def test_rows_hold_whole_aligned_documents_and_padding(
        self, lengths: list[int], rows: int, alignment: int
    ) -> None:
        seen: Counter[int] = Counter()
        for packed in pack(numbered(lengths), rows=rows, length=32, alignment=alignment, pad=PAD):
            assert packed.ids.shape == packed.first.shape == packed.weights.shape == (rows, 32)
            for start, ids, weights in documents_of(packed):
                name = int(ids[0])
                length = lengths[name - 100]
                assert start % alignment == 0
                assert ids.tolist() == [name] * length + [PAD] * (len(ids) - length)
                assert weights.tolist() == [0, *[1] * (length - 1), *[0] * (len(ids) - length)]
                seen[name] += 1
        assert all(count == 1 for count in seen.values())

    def test_positions_count_within_documents(self) -> None:
        (packed,) = pack(numbered([3, 2]), rows=1, length=8, alignment=2, pad=PAD)
        batch = Batch(*map(torch.from_numpy, (packed.ids, packed.first, packed.weights)))
        assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]

    def test_no_document_waits_for_others_that_fit_better(self) -> None:
        lengths = [5, *[8] * 200]
        first = next(pack(numbered(lengths), rows=1, length=8, alignment=1, pad=PAD))
        assert first.ids[0, 0] == 100

    def test_end_of_the_documents_ends_the_batches(self) -> None:
        assert len(list(pack(numbered([8] * 5), rows=2, length=8, alignment=1, pad=PAD))) == 2


class TestMixture:
    def test_families_get_their_shares_of_the_tokens(self, data: DataSet) -> None:
        tokens: Counter[str] = Counter()

        class Counting:
            def draw(self, family: str, *args: object) -> Document:
                document = data.draw(family, *args)  # type: ignore[arg-type]
                tokens[family] += len(document)
                return document

        documents = draw_documents(Counting(), MIXTURE, seed="t", longest=512)  # type: ignore[arg-type]
        for _ in range(300):
            next(documents)
        total = tokens.total()
        for family, part in MIXTURE.items():
            assert tokens[family] / total == pytest.approx(part.share / 100, abs=0.02)

    def test_little_is_padding(self, data_folder: Path) -> None:
        stream = Stream(data_folder, MIXTURE, rows=8, length=1024)
        batches = itertools.islice(packed_batches(stream), 4)
        assert np.mean([(rows.ids == PAD).mean() for rows in batches]) < 0.03

    def test_what_does_not_fit_is_drawn_shorter(self, data: DataSet) -> None:
        mixture = {"needle": Part(1, (100, 8000))}
        documents = draw_documents(data, mixture, seed="t", longest=512)
        lengths = [len(document) for document in itertools.islice(documents, 40)]
        assert max(lengths) <= 512
        assert max(lengths) > 400

    def test_family_without_short_exercises_is_refused(self, data: DataSet) -> None:
        documents = draw_documents(data, {"tool_calls": Part(1, (9, 9))}, seed="t", longest=16)
        with pytest.raises(ConfigError, match=r"'tool_calls' are longer than rows of 16 tokens"):
            next(documents)

    def test_unknown_family_is_refused_with_those_there_are(self, data: DataSet) -> None:
        documents = draw_documents(data, {"poems": Part(1, (9, 9))}, seed="t", longest=16)
        with pytest.raises(ConfigError, match=r"'poems'; choose among prose, .*glosses"):
            next(documents)

    def test_filler_is_text_of_about_the_size(self, data: DataSet) -> None:
        texts = [data.filler(random.Random(i), 400) for i in range(10)]
        lengths = [len(ids) for ids in data.tokenizer.encode_texts(texts)]
        assert 200 < np.mean(lengths) < 900  # a small vocabulary makes invented text long
        assert not any("\ufffd" in text or "<｜" in text for text in texts)


def test_workers_start_without_torch() -> None:
    code = "import sys, leadline.tools.train_tiny.mixture; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


class TestLoader:
    def test_seed_and_worker_decide_what_is_drawn(self, data_folder: Path) -> None:
        stream = Stream(data_folder, MIXTURE, rows=2, length=512, seed=5)
        first, again, worker, seed = (
            next(packed_batches(s, w)).ids
            for s, w in ((stream, 0), (stream, 0), (stream, 1), (replace(stream, seed=6), 0))
        )
        assert (first == again).all()
        assert (first != worker).any()
        assert (first != seed).any()

    def test_workers_take_turns(self, data_folder: Path) -> None:
        stream = Stream(data_folder, MIXTURE, rows=2, length=512)
        expected = [packed_batches(stream, worker) for worker in (0, 1)]
        with BatchLoader(stream, workers=2) as batches:
            for _, made in zip(range(4), itertools.cycle(expected), strict=False):
                batch, rows = next(batches), next(made)
                assert batch.ids.tolist() == rows.ids.tolist()
                assert batch.first.tolist() == rows.first.tolist()
                assert batch.weights.tolist() == rows.weights.tolist()
            assert batch.ids.dtype == batch.first.dtype == torch.int64

    def test_thread_makes_what_the_first_worker_would(self, data_folder: Path) -> None:
        stream = Stream(data_folder, MIXTURE, rows=2, length=512)
        with BatchLoader(stream, workers=0) as batches:
            assert next(batches).ids.tolist() == next(packed_batches(stream)).ids.tolist()

    @pytest.mark.parametrize("workers", [0, 1], ids=["thread", "process"])
    def test_failure_is_raised_with_its_cause(self, data_folder: Path, workers: int) -> None:
        stream = Stream(data_folder, {"poems": Part(1, (9, 9))}, rows=2, length=512)
        with BatchLoader(stream, workers=workers) as batches:
            for _ in range(2):  # and stays one
                with pytest.raises((WorkerError, ConfigError), match="names family 'poems'"):
                    next(batches)

    def test_killed_worker_is_told(self, data_folder: Path) -> None:
        stream = Stream(data_folder, MIXTURE, rows=2, length=512)
        with BatchLoader(stream, workers=1) as batches:
            next(batches)
            (process,) = batches.processes
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(WorkerError, match="worker 0 of the batches was killed"):
                collections.deque(batches, maxlen=0)  # what was ready comes first

    def test_close_ends_every_worker(self, data_folder: Path) -> None:
        stream = Stream(data_folder, MIXTURE, rows=2, length=512)
        with BatchLoader(stream, workers=2) as batches:
            pass
        assert not any(process.is_alive() for process in batches.processes)


class TestHeldOut:
    def test_batches_are_always_the_same_and_of_one_family(self, data_folder: Path) -> None:
        stream = Stream(data_folder, MIXTURE, rows=2, length=512)
        first, again = heldout_batches(stream, 2), heldout_batches(replace(stream, seed=9), 2)
        assert list(first) == list(MIXTURE)
        for family, batches in first.items():
            assert len(batches) == 2
            assert all(
                torch.equal(a.ids, b.ids) for a, b in zip(batches, again[family], strict=True)
            )

    def test_prose_is_of_the_heldout_part(self, data_folder: Path) -> None:
        stream = Stream(data_folder, {"prose": Part(1, (20, 60))}, rows=1, length=64)
        heldout = DataSet(data_folder, prose="heldout")
        (batch,) = heldout_batches(stream, 1)["prose"]
        text = heldout.tokenizer.decode(batch.ids[0, 1:19].tolist())
        assert text in heldout.tokenizer.decode(heldout.prose.ids.tolist())
