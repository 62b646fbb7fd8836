"""Compressed entries and index keys of the groups that a step closes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from leadline.kernels.cpu.formats import as_bytes, encode_row
from leadline.kernels.cpu.hadamard import transform_row
from leadline.kernels.cpu.jit import F1, F2, I1, I2, Packed, Rings, in_float32, kernel
from leadline.kernels.cpu.rope import rotate_row
from leadline.kernels.packed import RecordField
from leadline.kernels.reference import compressor


@in_float32(compressor.store_entries)
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
    """One pass that pools, one that does the rest."""
    pooled: Tensor | NDArray[Any] = projected
    if open_groups is not None:
        pooled = np.zeros((len(pos), norm.shape[0]), np.float32)
        rows = (projected, pos, req_of_row, q_off, slot, seq_len, write_from)
        if ape is None:
            ape = norm.new_zeros(1, projected.shape[1] // 2)
        _pool(*rows, open_groups.numpy(), ape, ratio, pooled)
    return _norm_and_store(
        *(pooled, norm, cos, sin, pos, req_of_row, write_from, page_table, entries),
        ratio=ratio,
        eps=eps,
        hadamard=hadamard,
    )


@in_float32(compressor.store_index_keys)
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
    """The product of all rows, which is torch's, then one pass."""
    _norm_and_store(
        *(F.linear(latent, weight), norm, cos, sin, pos, req_of_row, write_from, page_table, keys),
        ratio=ratio,
        eps=eps,
    )


def _norm_and_store(
    x: Tensor | NDArray[Any],
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    pos: Tensor,
    req_of_row: Tensor,
    write_from: Tensor,
    page_table: Tensor,
    field: RecordField,
    *,
    ratio: int,
    eps: float,
    hadamard: bool = False,
) -> Tensor:
    """Rows that close a group, normalised; others are 0."""
    normed = np.zeros(x.shape, np.float32)
    _store(
        *(x, norm, cos, sin, pos, req_of_row, write_from, page_table),
        *(*as_bytes(field), ratio, eps, hadamard, normed),
    )
    return torch.from_numpy(normed)


@kernel
def _pool(
    projected: F2,
    pos: I1,
    req_of_row: I1,
    q_off: I1,
    slot: I1,
    seq_len: I1,
    write_from: I1,
    rings: Rings,
    ape: F2,
    ratio: int,
    pooled: F2,
) -> None:
    """Softmax over an entry's rows for each channel; then the ring keeps the newest rows."""
    width, ring, gates = pooled.shape[1], rings.shape[1], projected.shape[1] // 2
    top, total = np.empty(width, np.float32), np.empty(width, np.float32)
    for r in range(pos.shape[0]):
        g = req_of_row[r]
        if g < 0 or (pos[r] + 1) % ratio != 0 or pos[r] < write_from[g]:
            continue
        top[:] = -np.inf
        total[:] = 0
        for step in range(2):  # the largest gates, then the sums
            for back in range(min(gates // width * ratio, pos[r] + 1)):
                if r - back < q_off[g]:
                    row = rings[slot[g], (pos[r] - back) % ring]
                else:
                    row = projected[r - back]
                added = ape[(pos[r] - back) % ape.shape[0]]
                # Of the group before, where entries overlap, the first half counts.
                first = 0 if back >= ratio else gates - width
                for i in range(width):
                    gate = row[gates + first + i] + added[first + i]
                    if step == 0:
                        top[i] = max(top[i], gate)
                    else:
                        weight = math.exp(gate - top[i])
                        total[i] += weight
                        pooled[r, i] += weight * row[first + i]
        for i in range(width):
            pooled[r, i] /= total[i]
    for r in range(pos.shape[0]):
        g = req_of_row[r]
        if g >= 0 and pos[r] >= seq_len[g] - ring:
            rings[slot[g], pos[r] % ring] = projected[r]


@kernel
def _store(
    x: F2,
    norm: F1,
    cos: F2,
    sin: F2,
    pos: I1,
    req_of_row: I1,
    write_from: I1,
    page_table: I2,
    values: Packed,
    scales: Packed,
    record: int,
    ratio: int,
    eps: float,
    hadamard: bool,
    normed: F2,
) -> None:
    width, per_page = x.shape[1], values.shape[1]
    turned = np.empty(width, np.float32)
    for r in range(pos.shape[0]):
        g = req_of_row[r]
        if g < 0 or (pos[r] + 1) % ratio != 0 or pos[r] < write_from[g]:
            continue
        total = np.float32(0)
        for i in range(width):
            total += x[r, i] * x[r, i]
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            normed[r, i] = norm[i] * (x[r, i] * scale)
        rotate_row(normed[r], cos[r], sin[r], turned)
        if hadamard:
            transform_row(turned)
        entry = pos[r] // ratio
        page, place = page_table[g, entry // per_page], entry % per_page
        encode_row(turned, values[page, place], scales[page, place], record)
