"""Addresses that all layers of one half share: made once a step from a ``ForwardBatch``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from leadline.kernels import ops
from leadline.models.batch import CacheFields, ForwardBatch


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one half of the model, with the geometry of their groups. All int64.

    Attributes:
        pos: ``[r]``.
        req_of_row: ``[r]``, group of each row; -1 for padding.
        q_off: ``[g + 1]``, first row of each group, then the number of rows without padding.
        slot: ``[g]``.
        seq_len: ``[g]``.
        write_from: ``[g]``.
        page_table: ``[g, max pages]``.
        max_len: of every ``seq_len``, an upper bound that the host knows.
    """

    pos: Tensor
    req_of_row: Tensor
    q_off: Tensor
    slot: Tensor
    seq_len: Tensor
    write_from: Tensor
    page_table: Tensor
    max_len: int

    @staticmethod
    def of(batch: ForwardBatch, pos: Tensor, req_of_row: Tensor, q_off: Tensor) -> Rows:
        """Of a step's groups: these rows."""
        return Rows(
            pos,
            req_of_row,
            q_off,
            slot=batch.slot,
            seq_len=batch.seq_len,
            write_from=batch.write_from,
            page_table=batch.page_table.long(),
            max_len=batch.max_len,
        )


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Where window rows lie in the rings of a layer, and behind them (``ops.plan_window``).

    Attributes:
        index: ``[r, W]`` addresses that each row reads, oldest first, -1 behind them.
        width: ``[r]`` slots of the reference's list: ``min(seq_len, W)``.
        outer: ``[r]`` where each row is stored, with ``inner [r]``; -1 for padding.
        seen: ``[r]`` positions up to each row's own; none for padding.
        q_off: ``[g + 1]``, of the rows that are stored.
        stages: whether rows of some group may be stored behind the rings.
        window: W.
        staging: outer unit of the field behind the rings.
    """

    index: Tensor
    width: Tensor
    outer: Tensor
    inner: Tensor
    seen: Tensor
    q_off: Tensor
    stages: bool
    window: int
    staging: int


def plan_window(
    rows: Rows, floor: Tensor, stored: Tensor, *, max_rows: int, window: int, cache: CacheFields
) -> WindowPlan:
    """Window reads of rows at p cover ``[max(p - window + 1, floor), p]``.

    Args:
        rows: that read.
        floor: ``[g]`` int64, first position of each group that may be read.
        stored: ``[g + 1]`` int64, ``q_off`` of the rows that are stored: these, or more.
        max_rows: of a group, an upper bound of these.
        window: ``sliding_window``.
        cache: whose rings they are.
    """
    ring, staging = cache.ring, cache.staging
    stages = max_rows + window - 1 > ring  # some group may be too long for its ring
    index, width, outer, inner, seen = ops.plan_window(
        rows.pos,
        rows.req_of_row,
        stored,
        rows.seq_len,
        rows.slot,
        floor,
        window=window,
        ring=ring,
        staging=staging,
    )
    return WindowPlan(index, width, outer, inner, seen, stored, stages, window, staging)
