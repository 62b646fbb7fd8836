"""Compressed entries and index keys of the groups that a step closes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from leadline.kernels.cpu.exponential import exp
from leadline.kernels.cpu.formats import bytes_of, encode_row
from leadline.kernels.cpu.hadamard import transform_row
from leadline.kernels.cpu.jit import F1, F2, I1, I2, Packed, Rings, in_float32, kernel
from leadline.kernels.cpu.norm import normalise_row
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
        width = norm.shape[0]
        pooled = np.zeros((len(pos), width), np.float32)
        biases = np.zeros((ratio, width << overlaps), np.float32) if ape is None else ape
        place = (pos, req_of_row, q_off, slot, seq_len, write_from)
        _pool(projected, biases, *place, open_groups.numpy(), overlaps, pooled)
    rows = (norm, cos, sin, pos, req_of_row, write_from, page_table, entries)
    return _norm_and_store(pooled, *rows, ratio, eps, hadamard=hadamard)


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
    rows = (norm, cos, sin, pos, req_of_row, write_from, page_table, keys)
    _norm_and_store(F.linear(latent, weight), *rows, ratio, eps, hadamard=False)


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
    *,
    hadamard: bool,
) -> Tensor:
    """Rows that close a group, normalised; others are 0."""
    normed = np.zeros(x.shape, np.float32)
    rows = (x, norm, cos, sin, pos, req_of_row, write_from, page_table)
    _store(*rows, *bytes_of(field), ratio, eps, hadamard, normed)
    return torch.from_numpy(normed)


@kernel
def _pool(
    projected: F2,
    biases: F2,
    pos: I1,
    req_of_row: I1,
    q_off: I1,
    slot: I1,
    seq_len: I1,
    write_from: I1,
    rings: Rings,
    overlaps: bool,
    pooled: F2,
) -> None:
    """Softmax over a group's rows for each channel; then the ring keeps the newest rows."""
    width, ring, ratio = pooled.shape[1], rings.shape[1], biases.shape[0]
    gates, span = biases.shape[1], 2 * ratio if overlaps else ratio
    values, weights = np.empty((span, width), np.float32), np.empty((span, width), np.float32)
    top, total = np.empty(width, np.float32), np.empty(width, np.float32)
    for r in range(pos.shape[0]):
        g = req_of_row[r]
        if g < 0 or (pos[r] + 1) % ratio != 0 or pos[r] < write_from[g]:
            continue
        count = min(pos[r] + 1, span)  # there is nothing before position 0
        top[:] = -np.inf
        for back in range(count):
            # Of the group's own rows the second half of the channels counts, where there are two.
            first = width if overlaps and back < ratio else 0
            old, bias = rings[slot[g], (pos[r] - back) % ring], biases[(pos[r] - back) % ratio]
            for i in range(width):
                at = first + i
                if r - back < q_off[g]:
                    values[back, i], gate = old[at], old[gates + at]
                else:
                    values[back, i], gate = projected[r - back, at], projected[r - back, gates + at]
                weights[back, i] = gate + bias[at]
                top[i] = max(top[i], weights[back, i])
        total[:] = 0
        for back in range(count):
            for i in range(width):
                weight = exp(weights[back, i] - top[i])
                total[i] += weight
                pooled[r, i] += weight * values[back, i]
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
        normalise_row(x[r], norm, eps, normed[r])
        rotate_row(normed[r], cos[r], sin[r], turned)
        if hadamard:
            transform_row(turned)
        entry = pos[r] // ratio
        page, place = page_table[g, entry // per_page], entry % per_page
        encode_row(turned, values[page, place], scales[page, place], record)
