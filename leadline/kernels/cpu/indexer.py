"""Index scores, top-k selection and candidate blocks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leadline.kernels import debug
from leadline.kernels.cpu.formats import bits_of, load_row, pages_of
from leadline.kernels.cpu.hadamard import hadamard as transform
from leadline.kernels.cpu.jit import (
    F1,
    F2,
    F3,
    I1,
    I2,
    Packed,
    Real,
    Whole,
    in_float32,
    inline,
    inline_sums,
    kernel,
)
from leadline.kernels.cpu.kv_store import quantize_index_query
from leadline.kernels.cpu.rope import rotate
from leadline.kernels.packed import RecordField
from leadline.kernels.reference import indexer

_LOWEST = -0x7F800000  # the ordered integer of -inf, which never wins


def prepare_index_query(q: Tensor, cos: Tensor, sin: Tensor, *, hadamard: bool = False) -> Tensor:
    """Two passes, and the transform between them."""
    turned = rotate(q, cos, sin)
    return quantize_index_query(transform(turned) if hadamard else turned)


@in_float32(indexer.index_logits)
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
    """Keys of a group are unpacked once for all of its rows; float32 has nothing to round."""
    scores = np.empty((q.shape[0], num_entries), np.float32)
    if debug.switch.enabled:
        scores.fill(-np.inf)
    _index_logits(q, weights, *pages_of(keys), page_table, req_of_row, visible, scores)
    return torch.from_numpy(scores)


@inline_sums
def _score(q: F2, weights: F1, keys: F2, count: Whole, scores: F1) -> None:
    """Of one row against so many keys."""
    for j in range(count):
        score = np.float32(0)
        for h in range(q.shape[0]):
            dot = np.float32(0)
            for i in range(q.shape[1]):
                dot += q[h, i] * keys[j, i]
            dot = np.float32(0) if dot < 0 else dot
            score += dot * weights[h]
        scores[j] = score


@kernel
def _index_logits(
    q: F3,
    weights: F2,
    values: Packed,
    scales: Packed,
    record: int,
    floats: F3,
    page_table: I2,
    req_of_row: I1,
    visible: I1,
    scores: F2,
) -> None:
    rows, width = scores.shape[0], q.shape[2]
    per_page = values.shape[1]
    keys = np.empty((scores.shape[1], width), np.float32)
    unpacked, group = np.int64(0), np.int64(-1)
    for r in range(rows):
        if req_of_row[r] != group:
            unpacked, group = np.int64(0), req_of_row[r]
        for j in range(unpacked, visible[r]):
            page, entry = page_table[group, j // per_page], j % per_page
            load_row(values, scales, record, floats, page, entry, keys, j)
        unpacked = max(unpacked, visible[r])
        _score(q[r], weights[r], keys, visible[r], scores[r])


@in_float32(indexer.candidate_logits)
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
    """One key at a time."""
    scores = np.empty((q.shape[0], blocks.shape[1] * block_size), np.float32)
    rows = (page_table, req_of_row, blocks, visible)
    _candidate_logits(q, weights, *pages_of(keys), *rows, block_size, scores)
    return torch.from_numpy(scores)


@kernel
def _candidate_logits(
    q: F3,
    weights: F2,
    values: Packed,
    scales: Packed,
    record: int,
    floats: F3,
    page_table: I2,
    req_of_row: I1,
    blocks: I2,
    visible: I1,
    block_size: int,
    scores: F2,
) -> None:
    per_page = values.shape[1]
    key = np.empty((1, q.shape[2]), np.float32)
    for r in range(scores.shape[0]):
        for c in range(scores.shape[1]):
            block = blocks[r, c // block_size]
            j = block * block_size + c % block_size
            if block < 0 or j >= visible[r]:
                scores[r, c] = -np.inf
                continue
            page, entry = page_table[req_of_row[r], j // per_page], j % per_page
            load_row(values, scales, record, floats, page, entry, key, 0)
            _score(q[r], weights[r], key, 1, scores[r, c:])


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
def select_top_k(scores: Tensor, k: int, visible: Tensor | None = None) -> Tensor:
    """The k-th best value first, then the positions above it."""
    rows, entries = scores.shape
    selected = np.empty((rows, min(k, entries)), np.int64)
    counts = np.full(rows, entries) if visible is None else visible
    _select_top_k(scores, counts, k, selected)
    return torch.from_numpy(selected)


@kernel
def _select_top_k(scores: F2, counts: I1, k: int, selected: I2) -> None:
    rows, entries = scores.shape
    ordered, chosen = np.empty(entries, np.int32), np.empty(entries, np.bool_)
    for r in range(rows):
        for j in range(counts[r]):
            ordered[j] = _ordered(scores[r, j])
        _mark_top_k(ordered[: counts[r]], k, chosen)
        place = 0
        for j in range(counts[r]):
            if chosen[j]:
                selected[r, place] = j
                place += 1
        for j in range(place, selected.shape[1]):
            selected[r, j] = -1


def select_from_candidates(scores: Tensor, blocks: Tensor, k: int, *, block_size: int) -> Tensor:
    """Selected in candidate order."""
    return indexer.entries_of(select_top_k(scores, k), blocks, block_size)


@in_float32(indexer.select_candidate_blocks)
def select_candidate_blocks(
    scores: Tensor, visible: Tensor, *, block_size: int, topk_blocks: int
) -> Tensor:
    """The best score of every block, then the best blocks."""
    best = np.empty((scores.shape[0], -(-scores.shape[1] // block_size)), np.float32)
    _best_of_blocks(scores, visible, block_size, best)
    return select_top_k(torch.from_numpy(best), topk_blocks)


@kernel
def _best_of_blocks(scores: F2, visible: I1, block_size: int, best: F2) -> None:
    for r in range(scores.shape[0]):
        best[r] = -np.inf
        for j in range(visible[r]):
            if scores[r, j] > best[r, j // block_size]:  # NaN never is
                best[r, j // block_size] = scores[r, j]
        if visible[r] > 0:
            best[r, (visible[r] - 1) // block_size] = np.inf  # pinned
