"""Scheduled row groups -> ``ForwardBatch``. Runs once a step, so it is numpy over whole groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from leadline.engine.plan import RowGroup
from leadline.models.batch import ForwardBatch


class BatchBuilder:
    """Builds the tensors of a step on the CPU and moves them to the device.

    Args:
        num_history: ids before a group's first row that the model reads
            (``engram_max_ngram_size`` - 1).
        device: where the model runs.
    """

    def __init__(self, *, num_history: int, device: torch.device) -> None:
        self._num_history = num_history
        self._device = device

    def build(self, groups: Sequence[RowGroup]) -> ForwardBatch:
        """The batch of a step; shapes and dtypes as ``ForwardBatch`` says (8.2).

        A token that is still being sampled is 0 here: the runner puts it in on the device.
        """
        requests = [group.request for group in groups]
        starts = np.array([group.start for group in groups])
        counts = np.array([group.num_rows for group in groups])
        uppers = np.array([group.num_upper for group in groups])
        sampled = np.array([group.num_sampled for group in groups])
        q_off = np.zeros(len(groups) + 1, np.int32)
        np.cumsum(counts, out=q_off[1:])
        # Every request lies in the arrays of its own tokens and pages (array("i"): int32), which
        # numpy copies from as whole slices.
        ids = np.zeros(q_off[-1], np.int32)
        hist = np.full((len(groups), self._num_history), -1, np.int32)
        page_table = np.zeros((len(groups), max(len(r.pages) for r in requests)), np.int32)
        for i, (group, request) in enumerate(zip(groups, requests, strict=True)):
            known_ids = request.tokens[group.start : group.end]
            ids[q_off[i] : q_off[i] + len(known_ids)] = known_ids
            num_before = min(self._num_history, group.start)
            before = request.tokens[group.start - num_before : group.start]
            hist[i, self._num_history - num_before :] = before
            page_table[i, : len(request.pages)] = request.pages
        return ForwardBatch(
            ids=self._tensor(ids),
            pos=self._tensor(_last_of_each(starts + counts, counts)),
            req_of_row=self._tensor(np.repeat(np.arange(len(groups), dtype=np.int32), counts)),
            q_off=self._tensor(q_off),
            seq_len=self._tensor((starts + counts).astype(np.int32)),
            slot=self._integers([request.slot for request in requests]),
            floor_lo=self._integers([request.floor_lo for request in requests]),
            floor_up=self._integers([request.floor_up for request in requests]),
            write_from=self._integers([request.cached for request in requests]),
            page_table=self._tensor(page_table),
            hist=self._tensor(hist),
            rows_upper=self._tensor(_last_of_each(np.cumsum(counts), uppers)),
            sample_rows=self._tensor(_last_of_each(np.cumsum(uppers), sampled)),
        )

    def _integers(self, values: list[int]) -> torch.Tensor:
        return self._tensor(np.array(values, np.int32))

    def _tensor(self, values: NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _last_of_each(ends: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ``counts[i]`` integers before ``ends[i]``, ascending, of every i in turn."""
    last = np.cumsum(counts)
    return np.arange(last[-1]) + np.repeat(ends - last, counts)
