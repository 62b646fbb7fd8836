"""Scheduled row groups -> ``ForwardBatch``. Runs once a step, so it is numpy over whole groups.

All arrays of a step lie in one buffer, which travels to the device in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leadline.engine.plan import RowGroup
from leadline.kernels.transfer import page_locked
from leadline.models.batch import ForwardBatch

# Of ``ForwardBatch``: dtype and sizes by name. Fields begin at multiples of this many bytes.
_ALIGNMENT = 16
_FIELDS: dict[str, tuple[torch.dtype, tuple[str, ...]]] = {
    "ids": (torch.int32, ("rows",)),
    "pos": (torch.int64, ("rows",)),
    "req_of_row": (torch.int64, ("rows",)),
    "q_off": (torch.int64, ("bounds",)),
    "seq_len": (torch.int64, ("groups",)),
    "slot": (torch.int64, ("groups",)),
    "floor_lo": (torch.int64, ("groups",)),
    "floor_up": (torch.int64, ("groups",)),
    "write_from": (torch.int64, ("groups",)),
    "hist": (torch.int32, ("groups", "history")),
    "rows_upper": (torch.int64, ("upper",)),
    "req_of_upper": (torch.int64, ("upper",)),
    "upper_off": (torch.int64, ("bounds",)),
    "sample_rows": (torch.int64, ("sampled",)),
    # The longest of wide models, and last: a step copies the rows of its own groups.
    "page_table": (torch.int32, ("groups", "pages")),
}


class BatchShape(NamedTuple):
    """How many rows, groups, upper rows, sampled rows and pages of a group a batch has."""

    rows: int
    groups: int
    upper: int
    sampled: int
    pages: int

    @staticmethod
    def of(groups: Sequence[RowGroup]) -> BatchShape:
        """Of a step without padding."""
        return BatchShape(
            rows=sum(group.num_rows for group in groups),
            groups=len(groups),
            upper=sum(group.num_upper for group in groups),
            sampled=sum(group.num_sampled for group in groups),
            pages=max(len(group.request.pages) for group in groups),
        )


class BatchLayout:
    """Where the fields of batches lie in one buffer.

    Args:
        capacity: the largest batch; smaller ones are prefixes of its fields.
        num_history: ids of each group in ``hist``.
    """

    def __init__(self, capacity: BatchShape, num_history: int) -> None:
        self._history = num_history
        self._places: dict[str, tuple[slice, torch.dtype, tuple[int, ...]]] = {}
        end, sizes = 0, self._sizes(capacity)
        for name, (dtype, dims) in _FIELDS.items():
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            whole = tuple(sizes[size] for size in dims)
            end = start + math.prod(whole) * dtype.itemsize
            self._places[name] = slice(start, end), dtype, whole
        self.num_bytes = end

    def fields(self, buffer: Tensor, shape: BatchShape) -> dict[str, Tensor]:
        """Views of a buffer ``[num_bytes]`` uint8: a batch of this shape."""
        sizes = self._sizes(shape)
        return {
            name: buffer[place].view(dtype).view(whole)[: sizes[_FIELDS[name][1][0]]]
            for name, (place, dtype, whole) in self._places.items()
        }

    def used_bytes(self, shape: BatchShape) -> int:
        """Leading bytes of a buffer that hold a batch of this shape."""
        place, dtype, (_, pages) = self._places["page_table"]
        return int(place.start) + shape.groups * pages * dtype.itemsize

    def _sizes(self, shape: BatchShape) -> dict[str, int]:
        return {**shape._asdict(), "bounds": shape.groups + 1, "history": self._history}


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """Memory of the device that batches are copied to, so that all of them have its addresses.

    Attributes:
        layout: of the memory.
        buffer: ``[num_bytes]`` uint8.
        max_len: the longest sequence.
    """

    layout: BatchLayout
    buffer: Tensor
    max_len: int

    def batch(self, shape: BatchShape, max_rows: int) -> ForwardBatch:
        """The batch of this shape that was copied last, or will be."""
        fields = self.layout.fields(self.buffer, shape)
        return ForwardBatch(**fields, max_len=self.max_len, max_rows=max_rows)


class BatchBuilder:
    """Builds the tensors of a step on the CPU and moves them to the device.

    Args:
        num_history: ids before a group's first row that the model reads
            (``engram_max_ngram_size`` - 1).
        device: where the model runs.
    """

    def __init__(self, *, num_history: int, device: torch.device) -> None:
        self.num_history = num_history
        self.device = device

    def build(self, groups: Sequence[RowGroup]) -> ForwardBatch:
        """The batch of a step; shapes and dtypes as ``ForwardBatch`` says (8.2).

        A token that is still being sampled is 0 here: the runner puts it in on the device.
        """
        shape = BatchShape.of(groups)
        layout = BatchLayout(shape, self.num_history)
        buffer = self._filled(layout, shape, groups).to(self.device, non_blocking=True)
        return ForwardBatch(
            **layout.fields(buffer, shape),
            max_len=max(group.end for group in groups),
            max_rows=max(group.num_rows for group in groups),
        )

    def load(self, static: StaticBatch, shape: BatchShape, groups: Sequence[RowGroup]) -> None:
        """Put a step into static memory, padded to this shape."""
        num_bytes = static.layout.used_bytes(shape)
        buffer = self._filled(static.layout, shape, groups)
        static.buffer[:num_bytes].copy_(buffer[:num_bytes], non_blocking=True)

    def _filled(self, layout: BatchLayout, shape: BatchShape, groups: Sequence[RowGroup]) -> Tensor:
        """A buffer of the host with a batch in it: page-locked where the device is another."""
        make = torch.empty if self.device.type == "cpu" else page_locked
        buffer = make((layout.num_bytes,), dtype=torch.uint8)
        fields = layout.fields(buffer, shape)
        _fill({name: field.numpy() for name, field in fields.items()}, groups)
        return buffer


def _fill(out: Mapping[str, NDArray[np.integer]], groups: Sequence[RowGroup]) -> None:
    """Write the groups to the fields of a batch, and padding behind them."""
    requests = [group.request for group in groups]
    starts = np.array([group.start for group in groups], np.int64)
    counts = np.array([group.num_rows for group in groups], np.int64)
    uppers = np.array([group.num_upper for group in groups], np.int64)
    sampled = np.array([group.num_sampled for group in groups], np.int64)
    q_off, upper_off = _bounds(counts), _bounds(uppers)
    # Every request lies in the arrays of its own tokens and pages (array("i"): int32), which
    # numpy copies from as whole slices.
    ids, hist, page_table = out["ids"], out["hist"], out["page_table"]
    ids.fill(0)
    hist.fill(-1)
    page_table.fill(0)
    num_history = hist.shape[1]
    for i, (group, request) in enumerate(zip(groups, requests, strict=True)):
        known_ids = request.tokens[group.start : group.end]
        ids[q_off[i] : q_off[i] + len(known_ids)] = known_ids
        num_before = min(num_history, group.start)
        before = request.tokens[group.start - num_before : group.start]
        hist[i, num_history - num_before :] = before
        page_table[i, : len(request.pages)] = request.pages
    number = np.arange(len(groups))
    for name, values, padding in (
        ("pos", _last_of_each(starts + counts, counts), 0),
        ("req_of_row", np.repeat(number, counts), -1),
        ("q_off", q_off, q_off[-1]),
        ("seq_len", starts + counts, 1),
        ("slot", [request.slot for request in requests], 0),
        ("floor_lo", [request.floor_lo for request in requests], 0),
        ("floor_up", [request.floor_up for request in requests], 0),
        ("write_from", [request.cached for request in requests], 0),
        ("rows_upper", _last_of_each(q_off[1:], uppers), 0),
        ("req_of_upper", np.repeat(number, uppers), -1),
        ("upper_off", upper_off, upper_off[-1]),
        ("sample_rows", _last_of_each(upper_off[1:], sampled), 0),
    ):
        out[name][: len(values)] = values
        out[name][len(values) :] = padding


def _bounds(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """First place of each, then the number of all."""
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def _last_of_each(ends: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ``counts[i]`` integers before ``ends[i]``, ascending, of every i in turn."""
    last = np.cumsum(counts)
    return np.arange(counts.sum()) + np.repeat(ends - last, counts)
