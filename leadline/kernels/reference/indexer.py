"""Index scores, top-k selection and candidate blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from leadline.kernels.packed import RecordField
from leadline.kernels.reference.accumulate import widen
from leadline.kernels.reference.blocks import rows_per_block
from leadline.kernels.reference.kv_store import load_rows


def entry_address(
    entries: Tensor, page_table: Tensor, entries_per_page: int
) -> tuple[Tensor, Tensor]:
    """Page id and row of compressed positions ``[b, ...]`` under tables ``[b, max pages]``."""
    pages = page_table.gather(1, (entries // entries_per_page).flatten(1))
    return pages.view(entries.shape), entries % entries_per_page


def index_logits(
    q: Tensor,
    weights: Tensor,
    keys: RecordField,
    page_table: Tensor,
    q_off: Tensor,
    visible: Tensor,
) -> Tensor:
    """Groups of equal length run as one batched product."""
    num_entries = int(visible.max())
    scores = widen(q).new_full((q.shape[0], num_entries), -torch.inf)
    if not num_entries:
        return scores
    span = torch.arange(num_entries, device=q.device)
    for rows, groups in _equal_groups(q_off):
        table = page_table[groups]
        address = entry_address(span.expand(len(groups), -1), table, keys.values.shape[1])
        key = widen(load_rows(keys, *address, q.dtype)).transpose(1, 2)  # [b, di, N]
        step = rows_per_block(len(groups) * q.shape[1] * num_entries, q.device)
        for part in rows.split(step, dim=1):
            dot = (widen(q[part]).flatten(1, 2) @ key).to(q.dtype)  # [b, n * Hi, N]
            dot = widen(dot).relu().unflatten(1, (part.shape[1], -1))
            product = (dot * widen(weights[part]).unsqueeze(-1)).to(q.dtype)
            scores[part] = widen(widen(product).sum(2).to(q.dtype))
    return scores.masked_fill_(span >= visible.unsqueeze(1), -torch.inf)


def _equal_groups(q_off: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Groups that have rows, by length: row numbers ``[groups, length]`` and group numbers."""
    starts = q_off.tolist()
    by_length: dict[int, list[int]] = {}
    for group, (start, end) in enumerate(itertools.pairwise(starts)):
        if end > start:
            by_length.setdefault(end - start, []).append(group)
    for length, groups in by_length.items():
        first = torch.tensor([starts[group] for group in groups], device=q_off.device)
        rows = first.unsqueeze(1) + torch.arange(length, device=q_off.device)
        yield rows, torch.tensor(groups, device=q_off.device)


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


def select_top_k(scores: Tensor, k: int) -> Tensor:
    """Ascending positions, -1 behind them."""
    width = min(k, scores.shape[1])
    chosen = top_k_mask(scores, k)
    rows, positions = chosen.nonzero(as_tuple=True)
    place = chosen.cumsum(-1)[rows, positions] - 1
    selected = positions.new_full((scores.shape[0], width), -1)
    selected[rows, place] = positions
    return selected


def select_candidates(
    scores: Tensor, visible: Tensor, *, block_size: int, topk_blocks: int
) -> Tensor:
    """The block of the newest visible position is pinned and counts as one of the kept."""
    num_rows, num_entries = scores.shape
    num_blocks = -(-num_entries // block_size)
    padded = scores.new_full((num_rows, num_blocks * block_size), -torch.inf)
    padded[:, :num_entries] = torch.where(scores.isnan(), -torch.inf, scores)
    best = padded.unflatten(1, (num_blocks, block_size)).amax(-1)
    newest = (visible - 1) // block_size  # -1, which is no block, where nothing is visible
    pinned = torch.arange(num_blocks, device=scores.device) == newest.unsqueeze(1)
    kept = top_k_mask(best.masked_fill(pinned, torch.inf), topk_blocks)
    return kept.repeat_interleave(block_size, dim=1)[:, :num_entries]
