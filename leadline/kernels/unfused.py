"""What fused kernels do, as separate steps in torch (``--fusions``).

These are the ops whose references wait for the host, to learn how many rows are meant: here all
rows are computed, so that a graph can hold them. Norms and products within them are ops of their
own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leadline.kernels import ops
from leadline.kernels.packed import LinearWeight, RecordField, WeightFormat
from leadline.kernels.reference import attention, indexer, kv_store
from leadline.kernels.reference.blocks import rows_of_scores, rows_per_block
from leadline.kernels.reference.compressor import pool
from leadline.kernels.reference.hadamard import hadamard as transform
from leadline.kernels.reference.window import needs_staging


def norm_rotate_store(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    field: RecordField,
    outer: Tensor,
    inner: Tensor,
    *,
    eps: float,
) -> None:
    """Norm, rotation, packing, store."""
    row = ops.rotate(ops.rms_norm(x, weight, eps=eps), cos, sin)
    _store(field, outer >= 0, outer, inner, row)


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
    """Every row is pooled with those before it, whether it closes a group or not."""
    group, pooled = req_of_row.clamp(min=0), projected
    if open_groups is not None:
        ring = open_groups.shape[1]
        back = torch.arange((ratio << overlaps) - 1, -1, -1, device=pos.device)
        at_once = rows_per_block(len(back) * projected.shape[1], pos.device)
        parts = []
        for some in torch.arange(len(pos), device=pos.device).split(at_once):
            row, position = some.unsqueeze(1) - back, pos[some].unsqueeze(1) - back
            in_ring = open_groups[slot[group[some]].unsqueeze(1), position % ring]
            is_earlier = (row < q_off[group[some]].unsqueeze(1)).unsqueeze(2)
            rows = torch.where(is_earlier, in_ring, projected[row.clamp(min=0)])
            values, gates = rows.chunk(2, dim=-1)
            parts.append(pool(values, gates, position, ape=ape, overlaps=overlaps))
        pooled = torch.cat(parts)
        stays = (req_of_row >= 0) & (pos >= seq_len[group] - ring)
        place = slot[group].where(stays, 0), (pos % ring).where(stays, 0)
        open_groups[place] = projected.where(stays.unsqueeze(1), open_groups[0, 0])
    latent = ops.rms_norm(pooled.to(dtype), norm, eps=eps)
    row = ops.rotate(latent, cos, sin)
    if hadamard:
        row = transform(row)
    _store_closing(row, pos, req_of_row, write_from, page_table, entries, ratio)
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
    """The product, norm, rotation, packing, store."""
    key = ops.linear(latent, LinearWeight(weight, WeightFormat.PLAIN))
    key = ops.rotate(ops.rms_norm(key, norm, eps=eps), cos, sin)
    _store_closing(key, pos, req_of_row, write_from, page_table, keys, ratio)


def _store_closing(
    x: Tensor,
    pos: Tensor,
    req_of_row: Tensor,
    write_from: Tensor,
    page_table: Tensor,
    field: RecordField,
    ratio: int,
) -> None:
    """Rows that complete a group of their request at or above its ``write_from``."""
    group, page_size = req_of_row.clamp(min=0), ratio * field.values.shape[1]
    closes = ((pos + 1) % ratio == 0) & (req_of_row >= 0) & (pos >= write_from[group])
    page = page_table[group, pos // page_size]
    _store(field, closes, page, pos % page_size // ratio, x)


def _store(field: RecordField, is_stored: Tensor, outer: Tensor, inner: Tensor, x: Tensor) -> None:
    """Rows that are not stored write what lies in the null page, or the slot of padding, there."""
    packed = ops.pack_rows(x, field.record, field.rotary)
    values, scales = (
        None if new is None or old is None else new.where(is_stored.unsqueeze(1), old[0, 0])
        for new, old in zip(packed, (field.values, field.scales), strict=True)
    )
    assert values is not None
    kv_store.store_rows(field, outer.where(is_stored, 0), inner.where(is_stored, 0), values, scales)


def commit_window(
    rings: RecordField,
    q_off: Tensor,
    seq_len: Tensor,
    slot: Tensor,
    *,
    window: int,
    staging: int,
) -> None:
    """A ring's rows of every group; those that stay are row 0 of slot 0, written to itself."""
    ring, count = rings.values.shape[1], q_off.diff()
    back = torch.arange(ring, 0, -1, device=q_off.device)
    is_staged = needs_staging(count, window=window, ring=ring).unsqueeze(1)
    moves = is_staged & (back <= count.unsqueeze(1))
    source = (staging * ring + q_off[1:].unsqueeze(1) - back).where(moves, 0)
    outer = slot.unsqueeze(1).where(moves, 0)
    inner = ((seq_len.unsqueeze(1) - back) % ring).where(moves, 0)
    kv_store.store_rows(rings, outer, inner, *rings.gather(source // ring, source % ring))


def candidate_logits(
    q: Tensor,
    weights: Tensor,
    keys: RecordField,
    page_table: Tensor,
    req_of_row: Tensor,
    blocks: Tensor,
    visible: Tensor,
    *,
    block_size: int,
    exact_rounding: bool,
) -> Tensor:
    """Every entry is scored, as if there were no candidates; the scores of these are kept."""
    entries = blocks.unsqueeze(2) * block_size + torch.arange(block_size, device=q.device)
    entries = entries.flatten(1)  # absent ones are negative
    num_entries = page_table.shape[1] * keys.values.shape[1]
    at_once = rows_of_scores(num_entries)
    parts = []
    for first in range(0, len(q), at_once):
        rows = slice(first, first + at_once)
        scores = ops.index_logits(
            q[rows],
            weights[rows],
            keys,
            page_table,
            req_of_row[rows],
            visible[rows],
            num_entries,
            exact_rounding=exact_rounding,
        )
        parts.append(scores.gather(1, entries[rows].clamp(min=0)))
    hidden = (entries < 0) | (entries >= visible.unsqueeze(1))
    return torch.cat(parts).masked_fill_(hidden, -torch.inf)


def select_top_k(scores: Tensor, k: int, visible: Tensor | None = None) -> Tensor:
    """Some rows at a time, as each score takes several integers beside it."""
    at_once = rows_per_block(max(1, scores.shape[1]), scores.device)
    if visible is not None:
        scores = indexer.hide(scores, visible)
    return torch.cat([_select_top_k(part, k) for part in scores.split(at_once)])


def _select_top_k(scores: Tensor, k: int) -> Tensor:
    """Places of the chosen by counting them; all others are written behind the last."""
    width = min(k, scores.shape[1])
    chosen = indexer.top_k_mask(scores, k)
    place = (chosen.cumsum(-1) - 1).where(chosen, width)
    position = torch.arange(scores.shape[1], device=scores.device).expand_as(place)
    selected = position.new_full((len(scores), width + 1), -1)
    return selected.scatter_(1, place, position)[:, :width]


def select_candidate_blocks(
    scores: Tensor, visible: Tensor, *, block_size: int, topk_blocks: int
) -> Tensor:
    """The best score of every block, then the best of these."""
    best = indexer.best_of_blocks(scores, visible, block_size=block_size)
    return select_top_k(best, topk_blocks)


def select_from_candidates(scores: Tensor, blocks: Tensor, k: int, *, block_size: int) -> Tensor:
    """The best, and the entries at their places."""
    return indexer.entries_of(select_top_k(scores, k), blocks, block_size)


def sparse_attention(*args: Any, exact_rounding: bool, **kwargs: Any) -> Tensor:
    """Keys gathered and expanded, rotations, two products, a softmax over whole rows between."""
    return attention.sparse_attention(*args, exact_rounding=False, **kwargs)


IMPLEMENTATIONS = {
    op.__name__: op
    for op in (
        norm_rotate_store,
        store_entries,
        store_index_keys,
        commit_window,
        candidate_logits,
        select_top_k,
        select_candidate_blocks,
        select_from_candidates,
        sparse_attention,
    )
}
