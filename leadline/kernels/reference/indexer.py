"""Index scores, top-k selection and candidate blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from leadline.kernels.packed import RecordField
from leadline.kernels.reference.accumulate import widen
from leadline.kernels.reference.blocks import rows_per_block
from leadline.kernels.reference.hadamard import hadamard as transform
from leadline.kernels.reference.kv_store import load_rows
from leadline.kernels.reference.quant import round_trip_fp4_32
from leadline.kernels.reference.rope import rotate


def entry_address(
    entries: Tensor, page_table: Tensor, entries_per_page: int
) -> tuple[Tensor, Tensor]:
    """Page id and row of compressed positions ``[b, ...]`` under tables ``[b, max pages]``."""
    pages = page_table.gather(1, (entries // entries_per_page).flatten(1))
    return pages.view(entries.shape), entries % entries_per_page


def prepare_index_query(q: Tensor, cos: Tensor, sin: Tensor, *, hadamard: bool = False) -> Tensor:
    """Rotated, then through MXFP4."""
    turned = rotate(q, cos, sin)
    return round_trip_fp4_32(transform(turned) if hadamard else turned)


def index_logits(
    q: Tensor,
    weights: Tensor,
    keys: RecordField,
    page_table: Tensor,
    req_of_row: Tensor,
    visible: Tensor,
    num_entries: int,
    *,
    exact_rounding: bool,
) -> Tensor:
    """Groups of equal length run as one batched product."""
    scores = q.new_empty(q.shape[0], num_entries)
    if not num_entries:
        return scores
    span = torch.arange(num_entries, device=q.device)
    at_once = rows_per_block(num_entries * q.shape[2], q.device)
    for rows, groups in _equal_groups(req_of_row, at_once):
        address = entry_address(
            span.expand(len(groups), -1), page_table[groups], keys.values.shape[1]
        )
        key = widen(load_rows(keys, *address, q.dtype)).transpose(1, 2)  # [b, di, N]
        step = rows_per_block(len(groups) * q.shape[1] * num_entries, q.device)
        for part in rows.split(step, dim=1):
            dot = (widen(q[part]).flatten(1, 2) @ key).unflatten(1, (part.shape[1], -1))
            scores[part] = _sum_heads(dot, weights[part], exact_rounding=exact_rounding)
    return hide(scores, visible)


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
    """Every row gathers keys of its own."""
    inside = torch.arange(block_size, device=q.device)
    entries = (blocks.unsqueeze(2) * block_size + inside).flatten(1)  # absent ones are negative
    scores = q.new_empty(entries.shape)
    step = rows_per_block(max(1, entries.shape[1]) * max(q.shape[1:]), q.device)
    for part in torch.arange(q.shape[0], device=q.device).split(step):
        table, found = page_table[req_of_row[part]], entries[part].clamp(min=0)
        address = entry_address(found, table, keys.values.shape[1])
        key = widen(load_rows(keys, *address, q.dtype)).transpose(1, 2)  # [n, di, N]
        dot = widen(q[part]) @ key
        scores[part] = _sum_heads(dot, weights[part], exact_rounding=exact_rounding)
    hidden = (entries < 0) | (entries >= visible.unsqueeze(1))
    return scores.masked_fill_(hidden, -torch.inf)


def _sum_heads(dot: Tensor, weights: Tensor, *, exact_rounding: bool) -> Tensor:
    """Wide products ``[..., Hi, N]`` -> scores ``[..., N]`` in the dtype of ``weights``."""

    def rounded(x: Tensor) -> Tensor:
        return widen(x.to(weights.dtype)) if exact_rounding else x

    product = rounded(rounded(dot).relu() * widen(weights).unsqueeze(-1))
    return product.sum(-2).to(weights.dtype)


def _equal_groups(req_of_row: Tensor, at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Groups that have rows, by length: row numbers ``[groups, length]`` and group numbers."""
    groups, lengths = torch.unique_consecutive(req_of_row, return_counts=True)
    first = lengths.cumsum(0) - lengths
    for length in lengths.unique().tolist():
        equal = lengths == length
        rows = first[equal].unsqueeze(1) + torch.arange(length, device=first.device)
        yield from zip(rows.split(at_once), groups[equal].split(at_once), strict=True)


def top_k_mask(scores: Tensor, k: int) -> Tensor:
    """The k best of each row; among equals the larger position wins; NaN and -inf never do."""
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    if k >= scores.shape[1]:
        return scores > -torch.inf
    threshold = scores.topk(k, dim=-1, sorted=True).values[:, -1:]
    above = scores > threshold
    ties = (scores == threshold) & (threshold > -torch.inf)
    from_the_end = ties.flip(-1).cumsum(-1).flip(-1)
    return above | (ties & (from_the_end <= k - above.sum(-1, keepdim=True)))


def select_top_k(scores: Tensor, k: int, visible: Tensor | None = None) -> Tensor:
    """Ascending positions, -1 behind them."""
    width = min(k, scores.shape[1])
    if visible is not None:
        scores = hide(scores, visible)
    chosen = top_k_mask(scores, k)
    rows, positions = chosen.nonzero(as_tuple=True)
    place = chosen.cumsum(-1)[rows, positions] - 1
    selected = positions.new_full((scores.shape[0], width), -1)
    selected[rows, place] = positions
    return selected


def hide(scores: Tensor, visible: Tensor) -> Tensor:
    """-inf from each row's ``visible`` on."""
    place = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill(place >= visible.unsqueeze(1), -torch.inf)


def select_candidate_blocks(
    scores: Tensor, visible: Tensor, *, block_size: int, topk_blocks: int
) -> Tensor:
    """The block of the newest visible position is pinned and counts as one of the kept."""
    return select_top_k(best_of_blocks(scores, visible, block_size=block_size), topk_blocks)


def best_of_blocks(scores: Tensor, visible: Tensor, *, block_size: int) -> Tensor:
    """``[m, blocks]`` the best score of each block; infinity where the newest entry is."""
    num_rows, num_entries = scores.shape
    num_blocks = -(-num_entries // block_size)
    padded = scores.new_full((num_rows, num_blocks * block_size), -torch.inf)
    padded[:, :num_entries] = hide(torch.where(scores.isnan(), -torch.inf, scores), visible)
    best = padded.unflatten(1, (num_blocks, block_size)).amax(-1)
    newest = (visible - 1) // block_size  # -1, which is no block, where nothing is visible
    pinned = torch.arange(num_blocks, device=scores.device) == newest.unsqueeze(1)
    return best.masked_fill(pinned, torch.inf)


def select_from_candidates(scores: Tensor, blocks: Tensor, k: int, *, block_size: int) -> Tensor:
    """Blocks ascend, so the order of candidates is that of their entries, ties included."""
    return entries_of(select_top_k(scores, k), blocks, block_size)


def entries_of(chosen: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """Entries at these places of the candidate order; -1 stays -1."""
    place = chosen.clamp(min=0)
    entries = blocks.gather(1, place // block_size) * block_size + place % block_size
    return entries.masked_fill(chosen < 0, -1)
