"""Compressed entries and index keys of the groups that a step closes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from leadline.kernels.cpu.formats import CODE_OF, encode_row
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
    """One pass that pools, one that does the rest; plain records take the reference."""
    if entries.scales is None or ape is not None:
        return compressor.store_entries(
            *(projected, norm, cos, sin, pos, req_of_row, q_off, slot, seq_len),
            *(write_from, page_table, entries, open_groups),
            ratio=ratio,
            eps=eps,
            dtype=dtype,
            ape=ape,
            overlaps=overlaps,
            hadamard=hadamard,
        )
    pooled: Tensor | NDArray[Any] = projected
    if open_groups is not None:
        pooled = np.zeros((len(pos), norm.shape[0]), np.float32)
        rows = (projected, pos, req_of_row, q_off, slot, seq_len, write_from)
        _pool(*rows, open_groups.numpy(), ratio, pooled)
    return _norm_and_store(
        *(pooled, norm, cos, sin, pos, req_of_row, write_from, page_table, entries, ratio, eps)
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
    """The product of all rows, which is torch's, then one pass; plain records as above."""
    rows = (norm, cos, sin, pos, req_of_row, write_from, page_table, keys)
    if keys.scales is None:
        compressor.store_index_keys(latent, weight, *rows, ratio=ratio, eps=eps)
    else:
        _norm_and_store(F.linear(latent, weight), *rows, ratio, eps)


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
    ratio: int,
    eps: float,
) -> Tensor:
    """Rows that close a group, normalised; others are 0."""
    assert field.scales is not None
    normed = np.zeros(x.shape, np.float32)
    _store(
        *(x, norm, cos, sin, pos, req_of_row, write_from, page_table),
        *(field.values.numpy(), field.scales.numpy(), CODE_OF[field.record], ratio, eps, normed),
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
    ratio: int,
    pooled: F2,
) -> None:
    """Softmax over a group's rows for each channel; then the ring keeps the newest rows."""
    width, ring = pooled.shape[1], rings.shape[1]
    for r in range(pos.shape[0]):
        g = req_of_row[r]
        if g < 0 or (pos[r] + 1) % ratio != 0 or pos[r] < write_from[g]:
            continue
        for i in range(width):
            top = np.float32(-np.inf)
            total, value = np.float32(0), np.float32(0)
            for step in range(2):  # the largest gate, then the sums
                for back in range(ratio):
                    if r - back < q_off[g]:
                        row = rings[slot[g], (pos[r] - back) % ring]
                    else:
                        row = projected[r - back]
                    if step == 0:
                        top = max(top, row[width + i])
                    else:
                        weight = math.exp(row[width + i] - top)
                        total += weight
                        value += weight * row[i]
            pooled[r, i] = value / total
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
        entry = pos[r] // ratio
        page, place = page_table[g, entry // per_page], entry % per_page
        encode_row(turned, values[page, place], scales[page, place], record)
