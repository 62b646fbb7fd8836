"""Addresses that all layers of one half share: made once a step from a ``ForwardBatch``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one half of the model, with the geometry of their groups.

    Attributes:
        pos: ``[r]`` int64.
        req_of_row: ``[r]`` int64, group of each row.
        q_off: ``[g + 1]`` int64, first row of each group, then r.
        slot: ``[g]`` int64.
        seq_len: ``[g]`` int64.
        write_from: ``[g]`` int64.
        page_table: ``[g, max pages]`` int64.
    """

    pos: Tensor
    req_of_row: Tensor
    q_off: Tensor
    slot: Tensor
    seq_len: Tensor
    write_from: Tensor
    page_table: Tensor

    def take(self, rows: Tensor) -> Rows:
        """The same groups with some of their rows, ascending."""
        req_of_row = self.req_of_row[rows]
        counts = torch.bincount(req_of_row, minlength=len(self.slot))
        return Rows(
            pos=self.pos[rows],
            req_of_row=req_of_row,
            q_off=_starts(counts, with_end=True),
            slot=self.slot,
            seq_len=self.seq_len,
            write_from=self.write_from,
            page_table=self.page_table,
        )


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Where window rows lie in the workspace ``[history | new rows]`` of a layer.

    A chunk may be longer than the ring, so its rows cannot be written before they are read
    (cache-and-scheduling 1.8): attention reads the workspace, the ring gets the last rows.

    Attributes:
        history_slot: ``[h]``, with ``history_row [h]``: ring rows that the new rows still see.
        index: ``[r, W]`` workspace rows, oldest first, -1 behind them.
        width: ``[r]`` slots of the reference's list: ``min(seq_len, W)``.
        commit: ``[c]`` new rows that go to the ring, at ``commit_slot [c]``, ``commit_row [c]``.
    """

    history_slot: Tensor
    history_row: Tensor
    index: Tensor
    width: Tensor
    commit: Tensor
    commit_slot: Tensor
    commit_row: Tensor

    def take(self, rows: Tensor) -> WindowPlan:
        """Some of the reading rows over the same workspace."""
        return dataclasses.replace(self, index=self.index[rows], width=self.width[rows])


def plan_window(rows: Rows, floor: Tensor, *, window: int, ring: int) -> WindowPlan:
    """Window reads of rows at p cover ``[max(p - window + 1, floor), p]``.

    Args:
        rows: at least one row in every group that has history.
        floor: ``[g]`` int64, first position of each group that may be read.
        window: ``sliding_window``.
        ring: rows of a ring.
    """
    num_rows, device = len(rows.pos), rows.pos.device
    count = rows.q_off[1:] - rows.q_off[:-1]
    # A group without rows here reads nothing; its first row would be another group's.
    first_row = rows.q_off[:-1].clamp(max=max(num_rows - 1, 0))
    start = torch.where(count > 0, rows.pos[first_row], floor)
    history = (start - floor).clamp(min=0, max=window - 1)
    history_start = _starts(history, with_end=False)
    group = torch.repeat_interleave(torch.arange(len(count), device=device), history)
    place = torch.arange(len(group), device=device) - history_start[group]
    history_pos = start[group] - history[group] + place

    g = rows.req_of_row
    oldest = torch.maximum(rows.pos - window + 1, floor[g]).unsqueeze(1)
    position = oldest + torch.arange(window, device=device)
    newest = rows.pos.unsqueeze(1)
    row = torch.arange(num_rows, device=device).unsqueeze(1)
    in_history = history_start[g].unsqueeze(1) + position - (start[g] - history[g]).unsqueeze(1)
    in_chunk = len(group) + row - (newest - position)
    index = torch.where(position < start[g].unsqueeze(1), in_history, in_chunk)
    commit = (rows.pos >= rows.seq_len[g] - ring).nonzero().squeeze(1)
    return WindowPlan(
        history_slot=rows.slot[group],
        history_row=history_pos % ring,
        index=index.masked_fill(position > newest, -1),
        width=rows.seq_len[g].clamp(max=window),
        commit=commit,
        commit_slot=rows.slot[g[commit]],
        commit_row=rows.pos[commit] % ring,
    )


def _starts(counts: Tensor, *, with_end: bool) -> Tensor:
    """Exclusive prefix sum, with the total behind it on request."""
    ends = counts.cumsum(0)
    return torch.cat((ends.new_zeros(1), ends)) if with_end else ends - counts
