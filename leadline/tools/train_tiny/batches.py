"""``Batch`` after ``Batch`` for the trainer, made by worker processes while it computes."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections.abc import Iterator
from itertools import cycle, islice
from multiprocessing.connection import Connection
from types import TracebackType

import torch

from leadline.tools.train_tiny.batch import Batch
from leadline.tools.train_tiny.dataset import DataSet
from leadline.tools.train_tiny.mixture import Stream, draw_documents, packed_batches, work
from leadline.tools.train_tiny.packing import PackedRows, pack

_PREFETCHED = 4  # batches ready beside the one that each worker holds


class WorkerError(RuntimeError):
    """A worker failed; the message is its traceback."""


class BatchLoader(Iterator[Batch]):
    """An endless stream of batches, to be closed: ``with BatchLoader(...) as batches``.

    The order is fixed: each worker has its own seed, and they take turns. With ``workers`` 0 a
    thread of this process makes the batches.

    Raises:
        WorkerError: from ``next``: a worker failed or was killed.
    """

    def __init__(self, stream: Stream, *, workers: int, pin_memory: bool = False) -> None:
        self._stream = stream
        self._pin_memory = pin_memory
        self._ready: queue.Queue[Batch | Exception] = queue.Queue(_PREFETCHED)
        self._is_closed = threading.Event()
        self._processes, self._connections = _start(stream, workers)
        self._thread = threading.Thread(target=self._prefetch, name="batches", daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        batch = self._ready.get()
        if isinstance(batch, Exception):
            self._ready.put(batch)  # a failure is for good
            raise batch
        return batch

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and the thread."""
        self._is_closed.set()
        for process in self._processes:
            process.terminate()  # what the thread waits for ends, too
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()

    def _prefetch(self) -> None:
        try:
            for rows in self._received():
                batch = to_batch(rows)
                self._ready.put(_pinned(batch) if self._pin_memory else batch)
                if self._is_closed.is_set():
                    return
        except Exception as error:  # raised again where it can be handled
            self._ready.put(error)

    def _received(self) -> Iterator[PackedRows]:
        if not self._connections:
            yield from packed_batches(self._stream)
        for number, connection in cycle(enumerate(self._connections)):
            try:
                received = connection.recv()
            except EOFError:
                raise WorkerError(
                    f"worker {number} of the batches was killed, perhaps for want of memory"
                ) from None
            if isinstance(received, str):
                raise WorkerError(f"worker {number} of the batches failed:\n{received}")
            yield received


def _start(
    stream: Stream, workers: int
) -> tuple[list[multiprocessing.process.BaseProcess], list[Connection]]:
    # Not forked: a child of a process that uses CUDA or threads is not safe.
    context = multiprocessing.get_context("spawn")
    processes: list[multiprocessing.process.BaseProcess] = []
    connections = []
    for number in range(workers):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(sender, stream, number), daemon=True)
        process.start()
        sender.close()  # the worker's copy alone is left: it ends, and the pipe does
        processes.append(process)
        connections.append(receiver)
    return processes, connections


def to_batch(rows: PackedRows) -> Batch:
    """Packed rows as the tensors that models take."""
    return Batch(
        torch.from_numpy(rows.ids.astype("int64")),
        torch.from_numpy(rows.first.astype("int64")),
        torch.from_numpy(rows.weights),
    )


def _pinned(batch: Batch) -> Batch:
    return Batch(batch.ids.pin_memory(), batch.first.pin_memory(), batch.weights.pin_memory())


def heldout_batches(stream: Stream, count: int) -> dict[str, list[Batch]]:
    """``count`` batches of each family that no training sees, always the same.

    Args:
        stream: its shapes, and sizes of its parts; shares and seed do not matter.
        count: batches per family.
    """
    data = DataSet(stream.folder, prose="heldout")
    batches = {}
    for family, part in stream.mixture.items():
        documents = draw_documents(
            data, {family: part}, seed=f"eval/{family}", longest=stream.length
        )
        packed = pack(
            documents,
            rows=stream.rows,
            length=stream.length,
            alignment=stream.alignment,
            pad=data.pad,
        )
        batches[family] = [to_batch(rows) for rows in islice(packed, count)]
    return batches
