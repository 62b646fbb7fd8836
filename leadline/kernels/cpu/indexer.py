"""Index scores, top-k selection and candidate blocks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leadline.kernels.cpu.formats import CODE_OF, bits_of, decode_row
from leadline.kernels.cpu.jit import (
    F2,
    F3,
    I1,
    I2,
    Flags2,
    Packed,
    Real,
    Whole,
    in_float32,
    inline,
    kernel,
)
from leadline.kernels.packed import RecordField
from leadline.kernels.reference import indexer

_LOWEST = -0x7F800000  # the ordered integer of -inf, which never wins


@in_float32(indexer.index_logits)
def index_logits(
    q: Tensor,
    weights: Tensor,
    keys: RecordField,
    page_table: Tensor,
    q_off: Tensor,
    visible: Tensor,
) -> Tensor:
    """Keys of a group are unpacked once for all of its rows."""
    if keys.scales is None:
        return indexer.index_logits(q, weights, keys, page_table, q_off, visible)
    scores = np.empty((q.shape[0], int(visible.max())), np.float32)
    _index_logits(
        q,
        weights,
        keys.values.numpy(),
        keys.scales.numpy(),
        CODE_OF[keys.record],
        page_table,
        q_off,
        visible,
        scores,
    )
    return torch.from_numpy(scores)


@kernel
def _index_logits(
    q: F3,
    weights: F2,
    values: Packed,
    scales: Packed,
    record: int,
    page_table: I2,
    q_off: I1,
    visible: I1,
    scores: F2,
) -> None:
    _, heads, width = q.shape
    per_page = values.shape[1]
    keys = np.empty((scores.shape[1], width), np.float32)
    for g in range(page_table.shape[0]):
        most = np.int64(0)
        for r in range(q_off[g], q_off[g + 1]):
            most = max(most, visible[r])
        for j in range(most):
            page, entry = page_table[g, j // per_page], j % per_page
            decode_row(values[page, entry], scales[page, entry], record, keys[j])
        for r in range(q_off[g], q_off[g + 1]):
            for j in range(visible[r]):
                score = np.float32(0)
                for h in range(heads):
                    dot = np.float32(0)
                    for i in range(width):
                        dot += q[r, h, i] * keys[j, i]
                    dot = np.float32(0) if dot < 0 else dot
                    score += dot * weights[r, h]
                scores[r, j] = score
            for j in range(visible[r], scores.shape[1]):
                scores[r, j] = -np.inf


@inline
def _ordered(x: Real) -> Whole:
    """An integer that orders as the number does; NaN as -inf."""
    bits = np.int64(bits_of(x))
    if x != x:
        return _LOWEST
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


@inline
def _kth_largest(ordered: NDArray[np.int32], k: Whole) -> Whole:
    """The largest value that at least ``k`` entries reach, found bit by bit."""
    found = np.int64(-(2**31))
    for bit in range(31, -1, -1):
        tried, count = found + (np.int64(1) << bit), 0
        for j in range(ordered.shape[0]):
            count += ordered[j] >= tried
        if count >= k:
            found = tried
    return found


@inline
def _mark_top_k(ordered: NDArray[np.int32], k: Whole, chosen: NDArray[np.bool_]) -> None:
    """The k best, the larger positions among equals; the lowest value never."""
    threshold = np.int64(_LOWEST)
    spare = np.int64(0)
    if k < ordered.shape[0]:
        threshold = _kth_largest(ordered, k)
        spare = np.int64(k)
        for j in range(ordered.shape[0]):
            spare -= ordered[j] > threshold
    for j in range(ordered.shape[0] - 1, -1, -1):
        tie = ordered[j] == threshold and spare > 0
        spare -= tie
        chosen[j] = (ordered[j] > threshold or tie) and ordered[j] > _LOWEST


@in_float32(indexer.select_top_k)
def select_top_k(scores: Tensor, k: int) -> Tensor:
    """The k-th best value first, then the positions above it."""
    width = min(k, scores.shape[1])
    selected = np.empty((scores.shape[0], width), np.int64)
    _select_top_k(scores, k, selected)
    return torch.from_numpy(selected)


@kernel
def _select_top_k(scores: F2, k: int, selected: I2) -> None:
    rows, entries = scores.shape
    ordered, chosen = np.empty(entries, np.int32), np.empty(entries, np.bool_)
    for r in range(rows):
        for j in range(entries):
            ordered[j] = _ordered(scores[r, j])
        _mark_top_k(ordered, k, chosen)
        place = 0
        for j in range(entries):
            if chosen[j]:
                selected[r, place] = j
                place += 1
        for j in range(place, selected.shape[1]):
            selected[r, j] = -1


@in_float32(indexer.select_candidates)
def select_candidates(
    scores: Tensor, visible: Tensor, *, block_size: int, topk_blocks: int
) -> Tensor:
    """The best score of every block, then the best blocks."""
    kept = np.empty(scores.shape, np.bool_)
    _select_candidates(scores, visible, block_size, topk_blocks, kept)
    return torch.from_numpy(kept)


@kernel
def _select_candidates(
    scores: F2, visible: I1, block_size: int, topk_blocks: int, kept: Flags2
) -> None:
    rows, entries = scores.shape
    num_blocks = -(-entries // block_size)
    best, chosen = np.empty(num_blocks, np.int32), np.empty(num_blocks, np.bool_)
    for r in range(rows):
        for b in range(num_blocks):
            best[b] = _LOWEST
        for j in range(entries):
            best[j // block_size] = max(best[j // block_size], _ordered(scores[r, j]))
        if visible[r] > 0:
            best[(visible[r] - 1) // block_size] = np.int32(0x7F800000)  # pinned, as infinity
        _mark_top_k(best, topk_blocks, chosen)
        for j in range(entries):
            kept[r, j] = chosen[j // block_size]
