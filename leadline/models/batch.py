"""``ForwardBatch``: every tensor of one step, and the only input a model gets.

Rows are tokens, groups are requests; a group's rows are contiguous and ascend by position. Decode
groups may hold several rows (a token and its drafts). cache-and-scheduling 8.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from leadline.kernels.debug import NonFiniteError
from leadline.kernels.packed import RecordField


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tensors of one step: m rows of g groups, u rows in the upper half, v of them sampled.

    Any of them may be padded, so that their number is one of few: groups at the end with a
    ``page_table`` of null pages and slot 0, and no rows; rows at the end of no group, at position
    0. What a padded row gives is never read, and it stores nothing (cache-and-scheduling 6.3).

    Attributes:
        ids: ``[m]`` int32, token ids.
        pos: ``[m]`` int64, absolute positions.
        req_of_row: ``[m]`` int64, group of each row; -1 for padding.
        q_off: ``[g + 1]`` int64, first row of each group, then the number of rows of groups.
        seq_len: ``[g]`` int64, the group's last position in this step plus one.
        slot: ``[g]`` int64, slot ids; 0 is the padding slot.
        floor_lo: ``[g]`` int64, s: window reads of layers up to the cut stop here.
        floor_up: ``[g]`` int64, U: the same above the cut.
        write_from: ``[g]`` int64, H: entries completing below it are not written.
        page_table: ``[g, max pages]`` int32; 0, the null page, past a group's last page.
        hist: ``[g, n]`` int32, ids before the group's first row, oldest first (n = the
            longest n-gram - 1); -1 before the sequence starts.
        rows_upper: ``[u]`` int64, rows of this batch that run the upper half, ascending: of each
            group its last ones.
        req_of_upper: ``[u]`` int64, group of each of them; -1 for padding.
        upper_off: ``[g + 1]`` int64, ``q_off`` of the upper rows.
        sample_rows: ``[v]`` int64, indices into the upper rows whose logits are wanted.
        max_len: an upper bound of ``seq_len``.
        max_rows: an upper bound of the rows of a group.
    """

    ids: Tensor
    pos: Tensor
    req_of_row: Tensor
    q_off: Tensor
    seq_len: Tensor
    slot: Tensor
    floor_lo: Tensor
    floor_up: Tensor
    write_from: Tensor
    page_table: Tensor
    hist: Tensor
    rows_upper: Tensor
    req_of_upper: Tensor
    upper_off: Tensor
    sample_rows: Tensor
    max_len: int
    max_rows: int


class CacheFields(Protocol):
    """The cache as a model sees it; implemented by ``cache.pool.CachePool``.

    Attributes:
        kv: KV source layer -> compressed entries, ``[page, entry]``.
        index: KV source layer -> index keys, ``[page, entry]``.
        window: per layer, ``[slot, position % ring]``, and room for a step's rows behind the slots.
        ring: rows of a slot of ``window``.
        staging: slots of ``window``: where the room behind them begins.
        open_groups: gated KV source layer -> wide rows ``[slot, position % rows, 2 d]``, twice as
            wide where entries overlap.
        open_index_groups: the same of index keys that have a compressor of their own.
    """

    @property
    def kv(self) -> Mapping[int, RecordField]: ...
    @property
    def index(self) -> Mapping[int, RecordField]: ...
    @property
    def window(self) -> Sequence[RecordField]: ...
    @property
    def ring(self) -> int: ...
    @property
    def staging(self) -> int: ...
    @property
    def open_groups(self) -> Mapping[int, Tensor]: ...
    @property
    def open_index_groups(self) -> Mapping[int, Tensor]: ...


class Model(Protocol):
    """What the runner asks of a model (cache-and-scheduling 8.5)."""

    def bind_cache(self, cache: CacheFields | None) -> None:
        """Take the cache that was sized after the weights were loaded; None lets go of one."""
        ...

    def lower(self, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """Run every row up to the cut's KV part; what ``upper`` reads of each row, ``[m, ..]``."""
        ...

    def upper(self, state: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """Run ``batch.rows_upper`` through the rest: final-normed hidden rows ``[u, D]``.

        Called in every step, after ``lower``: without upper rows it finishes what ``lower`` left.

        Args:
            state: rows ``batch.rows_upper`` of what ``lower`` returned, ``[u, ..]``.
            batch: the step's.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Head GEMM: ``[v, D]`` -> fp32 (or float64) logits ``[v, V]``."""
        ...


def forward(model: Model, batch: ForwardBatch) -> Tensor:
    """Both halves of a step whose upper rows are not padded, or are all of its rows: ``[u, D]``.

    Raises:
        NonFiniteError: with the row of the step, where an op watches for it.
    """
    state = model.lower(batch)
    if len(batch.rows_upper) < len(batch.ids):
        state = tuple(rows[batch.rows_upper] for rows in state)
    try:
        return model.upper(state, batch)
    except NonFiniteError as error:
        if error.row >= len(batch.rows_upper):
            raise
        raise NonFiniteError(error.op, int(batch.rows_upper[error.row]), error.layer) from error


def forward_sampled(model: Model, batch: ForwardBatch) -> Tensor:
    """Of ``forward``, the rows whose logits are wanted: ``[v, D]``."""
    return forward(model, batch)[batch.sample_rows]
