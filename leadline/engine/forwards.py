"""How the forward of a step is launched: op by op, or as graphs that were captured at start.

Graphs have few shapes, so steps are padded to them, and one place in memory, so steps are copied
there (cache-and-scheduling 6). A step of decode rows is one graph. One with rows of prompts is
two, cut where the model is: ``lower`` by its rows, ``upper`` by the rows that are left of them, and
a gather in between.
"""

from __future__ import annotations

import enum
import functools
import logging
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from leadline.cache.sizing import CacheSize, pages_of
from leadline.core.request import Request, SamplingParams
from leadline.engine.batch_builder import BatchBuilder, BatchLayout, BatchShape, StaticBatch
from leadline.engine.memory import bytes_in_use
from leadline.engine.plan import RowGroup, RowKind
from leadline.models.batch import ForwardBatch, Model, forward, forward_sampled

logger = logging.getLogger(__name__)

# Rows of graphs (6.2). Larger steps run op by op: there the device is the slower one.
DECODE_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, *range(256, 1025, 64))
LOWER_ROWS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
UPPER_ROWS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
# Stand-ins for requests while kernels are tuned are this long, where the model allows it.
TUNED_LENGTH = 32768

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Takes a function that launches work, records it, and returns what launches all of it again."""


class GraphMode(enum.StrEnum):
    """Which steps run as graphs."""

    OFF = "off"
    DECODE = "decode"  # those of decode rows only
    LOWER = "lower"  # and the lower half of those with rows of prompts
    ALL = "all"


class Forwards(Protocol):
    """Launches forwards; implemented by ``Eager`` and ``Graphs``."""

    def prepare(self, groups: Sequence[RowGroup]) -> tuple[ForwardBatch, Callable[[], Tensor]]:
        """Copy a step to the device.

        Returns:
            Its batch, and what launches its forward and returns the rows whose logits are wanted,
            ``[v, D]``, which the next forward may overwrite.
        """
        ...


class Eager:
    """Op by op, in the very shapes of the step."""

    def __init__(self, model: Model, builder: BatchBuilder) -> None:
        self._model, self._builder = model, builder

    def prepare(self, groups: Sequence[RowGroup]) -> tuple[ForwardBatch, Callable[[], Tensor]]:
        """See ``Forwards``."""
        batch = self._builder.build(groups)
        return batch, functools.partial(forward_sampled, self._model, batch)


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """What graphs are captured for.

    Attributes:
        max_num_seqs: requests of a step.
        max_num_batched_tokens: rows of a step.
        max_len: of a sequence.
        vocab_size: of the tokens of stand-ins.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_len: int
    vocab_size: int


class Graphs:
    """Steps of few shapes as graphs, the others op by op.

    Args:
        model: with its cache.
        builder: of batches.
        capture: records a graph.
        mode: not ``off``.
        limits: of steps.
        size: of the cache.
    """

    def __init__(
        self,
        model: Model,
        builder: BatchBuilder,
        capture: Capture,
        mode: GraphMode,
        limits: GraphLimits,
        size: CacheSize,
    ) -> None:
        self._model, self._builder = model, builder
        self._capture = capture
        self._limits, self._size = limits, size
        self._eager = Eager(model, builder)
        most = limits.max_num_batched_tokens
        lower, upper = mode in (GraphMode.LOWER, GraphMode.ALL), mode is GraphMode.ALL
        self._decode_rows = _up_to(DECODE_ROWS, limits.max_num_seqs)
        self._lower_rows = _within(LOWER_ROWS, most) if lower else ()
        self._upper_rows = _within(UPPER_ROWS, most) if upper else ()
        rows = max(limits.max_num_batched_tokens, self._decode_rows[-1])
        self._capacity = BatchShape(
            rows=rows,
            groups=max(limits.max_num_seqs, self._decode_rows[-1]),
            upper=rows,
            sampled=rows,
            pages=pages_of(limits.max_len, size.page_size),
        )
        # Steps of decode rows are short, and their copy to the device is what they begin with.
        self._decodes = self._memory_for(self._decode_shape(self._capacity.groups))
        self._prompts = self._memory_for(self._capacity)
        self._decode_batches = {
            rows: self._decodes.batch(self._decode_shape(rows), max_rows=1)
            for rows in self._decode_rows
        }
        self._decode: dict[int, Replay] = {}
        self._lower: dict[int, Replay] = {}
        self._upper: dict[int, Replay] = {}
        # Results of all graphs of a kind, the largest one's in full; made when it is captured.
        self._lower_out: tuple[Tensor, ...] = ()
        self._upper_in: tuple[Tensor, ...] = ()
        self._hidden = torch.empty(0)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs."""
        start, before = time.perf_counter(), bytes_in_use(self._builder.device)
        self.capture_largest(self.num_graphs)
        logger.info(
            "graphs: %d of decode rows (up to %d), %d and %d of prompts (up to %d and %d); "
            "captured in %.1f s, %.2f GiB",
            *(len(self._decode_rows), self._decode_rows[-1]),
            *(len(self._lower_rows), len(self._upper_rows)),
            *(max(self._lower_rows, default=0), max(self._upper_rows, default=0)),
            time.perf_counter() - start,
            (bytes_in_use(self._builder.device) - before) / 2**30,
        )

    @property
    def num_graphs(self) -> int:
        """Of all kinds."""
        return len(self._decode_rows) + len(self._lower_rows) + len(self._upper_rows)

    @torch.inference_mode()
    def launch_largest(self, count: int) -> None:
        """Launch once, op by op, what ``capture_largest`` would capture, and keep nothing."""
        try:
            self._make_buffers()
            for _, _, run in self._largest(count):
                run()
        finally:
            self._lower_out = self._upper_in = ()
            self._hidden = torch.empty(0)

    @torch.inference_mode()
    def capture_largest(self, count: int) -> None:
        """Capture so many of each kind, the largest one first: the others find its memory free."""
        self._make_buffers()
        for replays, rows, run in self._largest(count):
            replays[rows] = self._capture(run)

    def _largest(self, count: int) -> Iterator[tuple[dict[int, Replay], int, Callable[[], None]]]:
        """Where the graph of each belongs, its rows, and what launches it with the stand-ins."""
        for rows in reversed(self._lower_rows[-count:]):
            self._load_stand_ins(self._prompts, self._prefill_shape(rows, 0), num_upper=0)
            yield self._lower, rows, functools.partial(self._run_lower, rows)
        for rows in reversed(self._upper_rows[-count:]):
            self._load_stand_ins(self._prompts, self._prefill_shape(rows, rows), num_upper=rows)
            yield self._upper, rows, functools.partial(self._run_upper, rows)
        for rows in reversed(self._decode_rows[-count:]):
            self._load_stand_ins(self._decodes, self._decode_shape(rows))
            yield self._decode, rows, functools.partial(self._run_decode, rows)

    def prepare(self, groups: Sequence[RowGroup]) -> tuple[ForwardBatch, Callable[[], Tensor]]:
        """See ``Forwards``."""
        shape = BatchShape.of(groups)
        is_decode = shape.rows == shape.upper == shape.sampled == len(groups)
        if is_decode and (rows := _bucket(self._decode_rows, shape.rows)):
            self._builder.load(self._decodes, self._decode_shape(rows), groups)
            replay = functools.partial(self._replay_decode, rows, shape.rows)
            return self._decode_batches[rows], replay
        lower, upper = (
            _bucket(self._lower_rows, shape.rows),
            _bucket(self._upper_rows, shape.upper) if shape.upper else 0,
        )
        if not (lower or upper):
            return self._eager.prepare(groups)
        padded = self._prefill_shape(lower or shape.rows, upper or shape.upper)
        padded = padded._replace(sampled=shape.sampled)
        most = max(group.num_rows for group in groups)
        self._builder.load(self._prompts, padded, groups)
        batch = self._prompts.batch(padded, max_rows=most)
        return batch, functools.partial(self._replay_prefill, batch, lower, upper)

    def _memory_for(self, capacity: BatchShape) -> StaticBatch:
        layout = BatchLayout(capacity, self._builder.num_history)
        buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self._builder.device)
        return StaticBatch(layout, buffer, self._limits.max_len)

    # ---- shapes -----------------------------------------------------------------------------

    def _decode_shape(self, rows: int) -> BatchShape:
        return BatchShape(rows, rows, rows, rows, self._capacity.pages)

    def _prefill_shape(self, rows: int, upper: int) -> BatchShape:
        """Groups may be as many as requests, however few the rows."""
        return self._capacity._replace(rows=rows, upper=upper)

    # ---- what is captured -------------------------------------------------------------------

    def _run_decode(self, rows: int) -> None:
        self._hidden[:rows].copy_(forward(self._model, self._decode_batches[rows]))

    def _run_lower(self, rows: int) -> None:
        batch = self._prompts.batch(self._prefill_shape(rows, 0), max_rows=rows)
        for out, result in zip(self._lower_out, self._model.lower(batch), strict=True):
            out[:rows].copy_(result)

    def _run_upper(self, rows: int) -> None:
        """Rows of the lower half may be any, so none are left out of the shape."""
        shape = self._prefill_shape(self._capacity.rows, rows)
        batch = self._prompts.batch(shape, max_rows=self._capacity.rows)
        state = tuple(part[:rows] for part in self._upper_in)
        self._hidden[:rows].copy_(self._model.upper(state, batch))

    # ---- what is replayed -------------------------------------------------------------------

    def _replay_decode(self, rows: int, sampled: int) -> Tensor:
        self._decode[rows]()
        return self._hidden[:sampled]

    def _replay_prefill(self, batch: ForwardBatch, lower: int, upper: int) -> Tensor:
        """Either half may have no graph of its size, and runs op by op."""
        state = self._lower_out
        if lower:
            self._lower[lower]()
        else:
            state = self._model.lower(batch)
        if not upper:
            kept = tuple(part.index_select(0, batch.rows_upper) for part in state)
            return self._model.upper(kept, batch)[batch.sample_rows]
        for target, part in zip(self._upper_in, state, strict=True):
            torch.index_select(part, 0, batch.rows_upper, out=target[:upper])
        self._upper[upper]()
        return self._hidden[batch.sample_rows]

    # ---- memory and stand-ins ---------------------------------------------------------------

    def _make_buffers(self) -> None:
        """Of the shapes that a small step has."""
        self._load_stand_ins(self._decodes, self._decode_shape(1))
        batch = self._decode_batches[1]
        state = self._model.lower(batch)
        hidden = self._model.upper(state, batch)
        self._lower_out = _buffers(state, max(self._lower_rows, default=0))
        # Not all alike, or the choice of experts would be the same for all rows of a stand-in.
        self._upper_in = tuple(
            part.normal_() if part.is_floating_point() else part
            for part in _buffers(state, max(self._upper_rows, default=0))
        )
        (self._hidden,) = _buffers((hidden,), max(self._upper_rows + self._decode_rows))

    def _load_stand_ins(
        self, memory: StaticBatch, shape: BatchShape, *, num_upper: int | None = None
    ) -> None:
        """Requests like those to come, since what kernels take is measured with them.

        They use slots and pages that nobody has yet, and write no entries.

        Args:
            memory: where they are put.
            shape: of their step.
            num_upper: rows of a prompt that run the upper half; None for decode rows.
        """
        num_rows = 1 if num_upper is None else shape.rows
        groups = list(self._stand_ins(shape.rows, num_rows, 1 if num_upper is None else num_upper))
        self._builder.load(memory, shape, groups)

    def _stand_ins(self, rows: int, num_rows: int, num_upper: int) -> Iterator[RowGroup]:
        left = rows
        for number in range(rows):
            count = min(left, num_rows, self._limits.max_len, TUNED_LENGTH)
            if not count:
                return
            left -= count
            yield stand_in(number, count, min(count, num_upper), self._limits, self._size)


def stand_in(
    number: int, num_rows: int, num_upper: int, limits: GraphLimits, size: CacheSize
) -> RowGroup:
    """The last rows of a request that nobody made, of random tokens; nothing of it is sampled."""
    length = min(limits.max_len, max(TUNED_LENGTH, num_rows))
    # Another end each, so that rows choose other experts.
    draw = np.random.default_rng(number)
    ids = draw.integers(limits.vocab_size, size=length, dtype=np.int32)
    tokens = array("i", ids.tobytes())
    request = Request(f"stand-in-{number}", tokens, length, SamplingParams(), arrival=0.0)
    request.slot = 1 + number % (size.num_slots - 1)
    request.cached = length
    num_pages = pages_of(length, size.page_size)
    request.pages = array("i", (1 + i % (size.num_pages - 1) for i in range(num_pages)))
    kind, start = RowKind.PREFILL, length - num_rows
    return RowGroup(request, kind, start, num_rows, num_upper, num_sampled=0)


class CudaCapture:
    """Captures ``torch.cuda`` graphs that share one pool of memory: they never run side by side."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Run once, which compiles and tunes what is launched, then capture."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


def _buffers(like: Sequence[Tensor], rows: int) -> tuple[Tensor, ...]:
    return tuple(part.new_zeros(rows, *part.shape[1:]) for part in like)


def _within(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """The sizes that are not larger than some step."""
    return tuple(size for size in sizes if size <= most)


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """The sizes that all steps find one among that is not smaller, as far as there are any."""
    return tuple(sizes[: bisect_left(sizes, most) + 1])


def _bucket(sizes: Sequence[int], count: int) -> int:
    """The smallest size that holds so many; 0 where none does."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else 0
