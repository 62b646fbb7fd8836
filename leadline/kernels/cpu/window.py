"""Addresses of window rows, and how they get there, each in one pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leadline.kernels.cpu.formats import bytes_of, encode_row
from leadline.kernels.cpu.jit import F1, F2, I1, I2, Packed, kernel
from leadline.kernels.cpu.norm import normalise_row
from leadline.kernels.cpu.rope import rotate_row
from leadline.kernels.packed import RecordField


def plan_window(
    pos: Tensor,
    req_of_row: Tensor,
    q_off: Tensor,
    seq_len: Tensor,
    slot: Tensor,
    floor: Tensor,
    *,
    window: int,
    ring: int,
    staging: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Row by row."""
    index = np.empty((len(pos), window), np.int64)
    own = np.empty((4, len(pos)), np.int64)
    _plan(pos, req_of_row, q_off, seq_len, slot, floor, ring, staging, index, own)
    width, outer, inner, seen = torch.from_numpy(own)
    return torch.from_numpy(index), width, outer, inner, seen


@kernel
def _plan(
    pos: I1,
    req_of_row: I1,
    q_off: I1,
    seq_len: I1,
    slot: I1,
    floor: I1,
    ring: int,
    staging: int,
    index: I2,
    own: I2,
) -> None:
    window = index.shape[1]
    for r in range(index.shape[0]):
        index[r] = -1
        own[0, r], own[1, r], own[2, r], own[3, r] = 0, -1, 0, 0
        g = req_of_row[r]
        if g < 0:
            continue
        own[0, r], own[3, r] = min(seq_len[g], window), pos[r] + 1
        start = seq_len[g] - (q_off[g + 1] - q_off[g])
        stays = seq_len[g] - start + window - 1 <= ring
        for position in range(max(pos[r] - window + 1, floor[g]), pos[r] + 1):
            address = slot[g] * ring + position % ring
            if position >= start and not stays:
                address = staging * ring + q_off[g] + position - start
            index[r, position - max(pos[r] - window + 1, floor[g])] = address
        if stays:
            own[1, r], own[2, r] = slot[g], pos[r] % ring
        else:
            address = q_off[g] + pos[r] - start
            own[1, r], own[2, r] = staging + address // ring, address % ring


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
    """As below, without a query."""
    norm_query_store_window(x, weight[:0], weight, cos, sin, field, outer, inner, eps=eps)


def norm_query_store_window(
    down: Tensor,
    query_weight: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: RecordField,
    outer: Tensor,
    inner: Tensor,
    *,
    eps: float,
) -> Tensor:
    """Row by row, both halves."""
    query = np.empty((len(down), len(query_weight)), np.float32)
    place = (*bytes_of(window), outer, inner)
    _store(down, query_weight, weight, cos, sin, *place, eps, query)
    return torch.from_numpy(query)


@kernel
def _store(
    down: F2,
    query_weight: F1,
    weight: F1,
    cos: F2,
    sin: F2,
    values: Packed,
    scales: Packed,
    record: int,
    outer: I1,
    inner: I1,
    eps: float,
    query: F2,
) -> None:
    rank, row = query_weight.shape[0], np.empty(weight.shape[0], np.float32)
    for r in range(down.shape[0]):
        if rank > 0:
            normalise_row(down[r, :rank], query_weight, eps, query[r])
        if outer[r] >= 0:
            normalise_row(down[r, rank:], weight, eps, row)
            rotate_row(row, cos[r], sin[r], row)
            place = outer[r], inner[r]
            encode_row(row, values[place], scales[place], record)
