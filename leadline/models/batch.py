"""``ForwardBatch``: every tensor of one step, and the only input a model gets.

Rows are tokens, groups are requests; a group's rows are contiguous and ascend by position. Decode
groups may hold several rows (a token and its drafts). cache-and-scheduling 8.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from leadline.kernels.packed import RecordField


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tensors of one step: m rows of g groups, u rows in the upper half, v of them sampled.

    Attributes:
        ids: ``[m]`` int32, token ids.
        pos: ``[m]`` int64, absolute positions.
        req_of_row: ``[m]`` int32, group of each row.
        q_off: ``[g + 1]`` int32, first row of each group, then m.
        seq_len: ``[g]`` int32, the group's last position in this step plus one.
        slot: ``[g]`` int32, slot ids; 0 is the padding slot.
        floor_lo: ``[g]`` int32, s: window reads of layers up to the cut stop here.
        floor_up: ``[g]`` int32, U: the same above the cut.
        write_from: ``[g]`` int32, H: entries completing below it are not written.
        page_table: ``[g, max pages]`` int32; 0, the null page, past a group's last page.
        hist: ``[g, n]`` int32, ids before the group's first row, oldest first (n = the
            longest n-gram - 1); -1 before the sequence starts.
        rows_upper: ``[u]`` int64, rows of this batch that run the upper half, ascending.
        sample_rows: ``[v]`` int64, indices into the upper rows whose logits are wanted.
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
    sample_rows: Tensor


class CacheFields(Protocol):
    """The cache as a model sees it; implemented by ``cache.pool.CachePool``.

    Attributes:
        kv: KV source layer -> compressed entries, ``[page, entry]``.
        index: KV source layer -> index keys, ``[page, entry]``.
        window: per layer, ``[slot, position % ring]``.
        open_groups: gated KV source layer -> wide rows ``[slot, position % rows, 2 d]``.
    """

    @property
    def kv(self) -> Mapping[int, RecordField]: ...
    @property
    def index(self) -> Mapping[int, RecordField]: ...
    @property
    def window(self) -> Sequence[RecordField]: ...
    @property
    def open_groups(self) -> Mapping[int, Tensor]: ...


class Model(Protocol):
    """What the runner asks of a model (cache-and-scheduling 8.5)."""

    def bind_cache(self, cache: CacheFields) -> None:
        """Take the cache that was sized after the weights were loaded."""
        ...

    def lower(self, batch: ForwardBatch) -> Any:
        """Run every row up to the cut's KV part; returns the state that ``upper`` reads."""
        ...

    def upper(self, state: Any, batch: ForwardBatch) -> Tensor:
        """Run ``batch.rows_upper`` through the rest: final-normed hidden rows ``[u, D]``."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Head GEMM: ``[v, D]`` -> fp32 (or float64) logits ``[v, V]``."""
        ...
