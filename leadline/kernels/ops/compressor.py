"""Compressed entries and index keys of the groups that a step closes."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.kernels.packed import RecordField
from leadline.kernels.reference import compressor
from leadline.kernels.registry import op


@op(watched=False)
def store_entries(
    projected: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    pos: Tensor,
    req_of_row: Tensor,
    q_off: Tensor,
    slot: Tensor,
    seq_len: Tensor,
    write_from: Tensor,
    page_table: Tensor,
    entries: RecordField,
    open_groups: Tensor | None,
    *,
    ratio: int,
    eps: float,
    dtype: torch.dtype,
    ape: Tensor | None = None,
    overlaps: bool = False,
    hadamard: bool = False,
) -> Tensor:
    """Pool, normalise, rotate, pack and store every entry that a step completes (3.3).

    A group is stored iff it closes at or above its request's ``write_from``. The rows of a group
    that began in an earlier step come from the ring, which then keeps the newest rows of this one.

    V4 pools with ``ape``, and its index keys are entries of a compressor of their own (v4-model
    3.3, 3.4). Where entries overlap, one is pooled from the first halves of the rows of the group
    before (none before position 0) and the second halves of its own.

    Args:
        projected: ``[m, 2 c d]`` wide, values then gates, c being 2 where entries overlap and else
            1; or ``[m, d]`` activations of ratio 1.
        norm: ``[d]`` wide.
        cos: ``[m, r / 2]`` float32, for the row at p at the position ``p - ratio + 1``.
        sin: ``[m, r / 2]`` float32.
        pos: ``[m]`` int64; the rows of a request are consecutive.
        req_of_row: ``[m]`` int64, group of each row; -1 for padding, which nothing comes of.
        q_off: ``[g + 1]`` first row of each group, then m.
        slot: ``[g]`` int64.
        seq_len: ``[g]`` int64, the group's last position of this step plus one.
        write_from: ``[g]`` int64.
        page_table: ``[g, max pages]`` int64.
        entries: pages of the KV source.
        open_groups: ``[slots, ring, 2 c d]`` wide, rows of ``projected`` by ``position % ring``;
            None with ratio 1.
        ratio: tokens of a group; ``ring >= c ratio - 1``.
        eps: of the norm.
        dtype: of activations.
        ape: ``[ratio, c d]`` wide, added to the gates of the row at p: row ``p % ratio``.
        overlaps: whether groups overlap.
        hadamard: entries go through ``reference.hadamard`` between rotation and packing.

    Returns:
        ``[m, d]`` activations: the latent, not rotated, at each row that stores an entry. Other
        rows are undefined.
    """
    return compressor.store_entries(
        projected,
        norm,
        cos,
        sin,
        pos,
        req_of_row,
        q_off,
        slot,
        seq_len,
        write_from,
        page_table,
        entries,
        open_groups,
        ratio=ratio,
        eps=eps,
        dtype=dtype,
        ape=ape,
        overlaps=overlaps,
        hadamard=hadamard,
    )


@op(watched=False)
def store_index_keys(
    latent: Tensor,
    weight: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    pos: Tensor,
    req_of_row: Tensor,
    write_from: Tensor,
    page_table: Tensor,
    keys: RecordField,
    *,
    ratio: int,
    eps: float,
) -> None:
    """Project, normalise, rotate, pack and store the index key of every stored entry (3.4).

    Args:
        latent: ``[m, d]`` activations of ``store_entries``; rows that store nothing are not read.
        weight: ``[di, d]``; the input of its product is not quantised.
        norm: ``[di]`` wide.
        cos: as in ``store_entries``, like all that is not named here.
        sin: likewise.
        pos: likewise.
        req_of_row: likewise.
        write_from: likewise.
        page_table: likewise.
        keys: pages of index keys.
        ratio: tokens of a group.
        eps: of the norm.
    """
    compressor.store_index_keys(
        latent,
        weight,
        norm,
        cos,
        sin,
        pos,
        req_of_row,
        write_from,
        page_table,
        keys,
        ratio=ratio,
        eps=eps,
    )
