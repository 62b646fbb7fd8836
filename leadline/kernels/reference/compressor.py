"""Compressed entries and index keys of the groups that a step closes."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.kernels.packed import LinearWeight, RecordField, WeightFormat
from leadline.kernels.reference import kv_store
from leadline.kernels.reference.hadamard import hadamard as transform
from leadline.kernels.reference.linear import linear
from leadline.kernels.reference.norm import rms_norm
from leadline.kernels.reference.rope import rotate


def compress(values: Tensor, gates: Tensor) -> Tensor:
    """The softmax runs over the group, separately for each channel."""
    return (values * gates.softmax(1)).sum(1)


def pool(
    values: Tensor, gates: Tensor, position: Tensor, *, ape: Tensor | None, overlaps: bool
) -> Tensor:
    """Entries of the rows that belong to each, ``[n, c ratio, c d]`` (v4-model 3.3).

    Args:
        values: of the group before, where entries overlap, then of the own one.
        gates: likewise, without ``ape``.
        position: ``[n, c ratio]`` int64; there is no row below 0, whatever it holds.
        ape: as ``store_entries`` has it.
        overlaps: c is 2, and else 1.

    Returns:
        ``[n, d]``.
    """
    if ape is not None:
        gates = gates + ape[position % len(ape)]
    if overlaps:
        values, gates = _halves(values), _halves(gates)
        absent = (position < 0).unsqueeze(2)
        values, gates = values.masked_fill(absent, 0), gates.masked_fill(absent, -torch.inf)
    return compress(values, gates)


def _halves(x: Tensor) -> Tensor:
    """``[n, 2 ratio, 2 d]`` -> ``[n, 2 ratio, d]``: first halves of the older rows, second halves
    of the newer.
    """
    ratio, width = x.shape[1] // 2, x.shape[2] // 2
    return torch.cat((x[:, :ratio, :width], x[:, ratio:, width:]), dim=1)


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
    """Rows are looked for in the step first, then in the ring, which is refreshed last."""
    closing = _closing_rows(pos, req_of_row, write_from, ratio)
    if open_groups is None:
        pooled = projected[closing]
    else:
        ring = open_groups.shape[1]
        back = torch.arange((ratio << overlaps) - 1, -1, -1, device=pos.device)
        row, group = closing.unsqueeze(1) - back, req_of_row[closing]
        position = pos[closing].unsqueeze(1) - back
        in_step = projected[row.clamp(min=0)]
        in_ring = open_groups[slot[group].unsqueeze(1), position % ring]
        is_earlier = (row < q_off[group].unsqueeze(1)).unsqueeze(2)
        values, gates = torch.where(is_earlier, in_ring, in_step).chunk(2, dim=-1)
        pooled = pool(values, gates, position, ape=ape, overlaps=overlaps)
        kept = ((req_of_row >= 0) & (pos >= seq_len[req_of_row] - ring)).nonzero().squeeze(1)
        open_groups[slot[req_of_row[kept]], pos[kept] % ring] = projected[kept]

    latent = torch.zeros(len(pos), norm.shape[0], dtype=dtype, device=pos.device)
    latent[closing] = rms_norm(pooled.to(dtype), norm, eps=eps)
    entry = rotate(latent[closing], cos[closing], sin[closing])
    if hadamard:
        entry = transform(entry)
    _store(entry, closing, pos, req_of_row, page_table, entries, ratio)
    return latent


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
    """The projection is rounded before its norm, as every product is."""
    closing = _closing_rows(pos, req_of_row, write_from, ratio)
    key = linear(latent[closing], LinearWeight(weight, WeightFormat.PLAIN))
    key = rotate(rms_norm(key, norm, eps=eps), cos[closing], sin[closing])
    _store(key, closing, pos, req_of_row, page_table, keys, ratio)


def _closing_rows(pos: Tensor, req_of_row: Tensor, write_from: Tensor, ratio: int) -> Tensor:
    """Rows that complete a group at or above ``write_from``; rows of no request complete none."""
    closes = (pos + 1) % ratio == 0
    return (closes & (req_of_row >= 0) & (pos >= write_from[req_of_row])).nonzero().squeeze(1)


def _store(
    x: Tensor,
    closing: Tensor,
    pos: Tensor,
    req_of_row: Tensor,
    page_table: Tensor,
    field: RecordField,
    ratio: int,
) -> None:
    page_size = ratio * field.values.shape[1]
    position = pos[closing]
    page = page_table[req_of_row[closing], position // page_size]
    entry = position % page_size // ratio
    kv_store.store_rows(field, page, entry, *kv_store.pack_rows(x, field.record, field.rotary))
