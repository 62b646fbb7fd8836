"""Sparse attention over the window and the selected entries, with a sink."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leadline.kernels.cpu.exponential import exp
from leadline.kernels.cpu.formats import load_row, pages_of
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
from leadline.kernels.cpu.kv_store import unpack_rows
from leadline.kernels.cpu.rope import rotate_row
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import attention
from leadline.kernels.reference.quant import store_fp8_32

_NO_BYTES, _NO_FLOATS = np.empty((0, 1, 0), np.uint8), np.empty((0, 1, 0), np.float32)
_NO_COUNTS = np.empty(0, np.int64)


@in_float32(attention.sparse_attention)
def sparse_attention(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: RecordField,
    window_index: Tensor,
    window_width: Tensor,
    kv: RecordField | None,
    page_table: Tensor,
    req_of_row: Tensor,
    selected: Tensor | None,
    sink: Tensor,
    *,
    exact_rounding: bool,
    visible: Tensor | None = None,
    lse: Tensor | None = None,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Row by row: gather and unpack the keys once for all heads, then a softmax of each head.

    In prompts rows of the window belong to many queries, so those that any of them sees are
    unpacked before.
    """
    pages = (_NO_BYTES, _NO_BYTES, 0, _NO_FLOATS) if kv is None else pages_of(kv)
    index: Tensor | NDArray[np.int64] = window_index
    if len(q) > len(page_table):
        seen, index = _seen_rows(window_index, window.values.shape[:2].numel())
        window = RecordField(Record.FLOAT32, _window_rows(window, seen).unsqueeze(0), None)
    entries = window_index[:, :0] if selected is None else selected
    most = entries.shape[1] if visible is None else int(visible.numpy().max(initial=0))
    out, logs = np.empty(q.shape, np.float32), np.empty(q.shape[:2], np.float32)
    _attend(
        q,
        cos,
        sin,
        *pages_of(window),
        index,
        *pages,
        page_table,
        req_of_row,
        entries,
        _NO_COUNTS if visible is None else visible,
        sink,
        window_index.shape[1] + most,
        out,
        logs,
    )
    if lse is not None:
        lse.copy_(torch.from_numpy(logs))
    if fp8 is not None:
        store_fp8_32(torch.from_numpy(out), *fp8)
    return torch.from_numpy(out)


def _window_rows(window: RecordField, seen: Tensor) -> Tensor:
    """Rows at ``outer * rows of an outer unit + inner``, float32."""
    if window.record is Record.FLOAT32:
        return window.values.flatten(0, 1).index_select(0, seen)
    ring = window.values.shape[1]
    found = window.gather(seen // ring, seen % ring)
    return unpack_rows(*found, window.record, torch.float32, window.rotary)


def _seen_rows(index: Tensor, num_rows: int) -> tuple[Tensor, NDArray[np.int64]]:
    """Rows that an index names, each once, and the index into these; -1 stays -1."""
    seen, place = np.empty(index.numel(), np.int64), np.empty(index.shape, np.int64)
    count = np.zeros(1, np.int64)
    _list_seen(index, np.full(num_rows, -1), seen, place, count)
    return torch.from_numpy(seen[: count[0]]), place


@kernel
def _list_seen(index: I2, place_of: I1, seen: I1, place: I2, count: I1) -> None:
    for r in range(index.shape[0]):
        for j in range(index.shape[1]):
            row = index[r, j]
            place[r, j] = -1
            if row >= 0:
                if place_of[row] < 0:
                    place_of[row] = count[0]
                    seen[count[0]] = row
                    count[0] += 1
                place[r, j] = place_of[row]


@inline_sums
def _dots(q: F1, keys: F2, out: F1) -> None:
    """Products with every key: of four at a time, which hide each other's latencies."""
    count, width = keys.shape
    whole = count - count % 4
    for j in range(0, whole, 4):
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(width):
            a += q[i] * keys[j, i]
            b += q[i] * keys[j + 1, i]
            c += q[i] * keys[j + 2, i]
            d += q[i] * keys[j + 3, i]
        out[j], out[j + 1], out[j + 2], out[j + 3] = a, b, c, d
    for j in range(whole, count):
        dot = np.float32(0)
        for i in range(width):
            dot += q[i] * keys[j, i]
        out[j] = dot


@inline_sums
def _weighted_sum(weights: F1, keys: F2, out: F1) -> None:
    """Of four keys at a time, so that ``out`` is read and written less."""
    count, width = keys.shape
    whole = count - count % 4
    for i in range(width):
        out[i] = 0
    for j in range(0, whole, 4):
        a, b, c, d = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for i in range(width):
            out[i] += (a * keys[j, i] + b * keys[j + 1, i]) + (
                c * keys[j + 2, i] + d * keys[j + 3, i]
            )
    for j in range(whole, count):
        for i in range(width):
            out[i] += weights[j] * keys[j, i]


@inline_sums
def _attend_head(
    q: F1,
    keys: F2,
    sink: Real,
    weights: F1,
    out: F1,
) -> Real:
    """Softmax of one scaled query over ``keys [n, d]``, which are the values too.

    Returns:
        The logarithm of the weights' sum without the sink.
    """
    count = keys.shape[0]
    _dots(q, keys, weights)
    top, of_keys = np.float32(-1e30), np.float32(0)
    for j in range(count):
        top = max(top, weights[j])
    for j in range(count):
        weights[j] = exp(weights[j] - top)
        of_keys += weights[j]
    _weighted_sum(weights, keys, out)
    total = of_keys + exp(sink - top)
    if total == 0:  # no key, and a sink of -inf
        total = np.float32(1)
    for i in range(out.shape[0]):
        out[i] /= total
    return top + np.log(of_keys)


# Each of these is a part of its own, since compilers make vector instructions of short ones only.
@inline
def _load_window(
    values: Packed, scales: Packed, record: Whole, floats: F3, index: I1, keys: F2
) -> Whole:
    """Rows at these addresses; how many there are."""
    ring, count = values.shape[1], 0
    for j in range(index.shape[0]):
        if index[j] >= 0:
            load_row(values, scales, record, floats, index[j] // ring, index[j] % ring, keys, count)
            count += 1
    return count


@inline
def _load_selected(
    values: Packed, scales: Packed, record: Whole, floats: F3, pages: I1, selected: I1, keys: F2
) -> Whole:
    """These entries, as above."""
    per_page, count = values.shape[1], 0
    for j in range(selected.shape[0]):
        entry = selected[j]
        if entry >= 0:
            page = pages[entry // per_page]
            load_row(values, scales, record, floats, page, entry % per_page, keys, count)
            count += 1
    return count


@inline
def _load_first(
    values: Packed, scales: Packed, record: Whole, floats: F3, pages: I1, count: Whole, keys: F2
) -> Whole:
    """The first entries, as above."""
    per_page = values.shape[1]
    for entry in range(count):
        page = pages[entry // per_page]
        load_row(values, scales, record, floats, page, entry % per_page, keys, entry)
    return count


@kernel
def _attend(
    q: F3,
    cos: F2,
    sin: F2,
    window_values: Packed,
    window_scales: Packed,
    window_record: int,
    window_floats: F3,
    window_index: I2,
    values: Packed,
    scales: Packed,
    record: int,
    floats: F3,
    page_table: I2,
    req_of_row: I1,
    selected: I2,
    visible: I1,
    sink: F1,
    slots: int,
    out: F3,
    lse: F2,
) -> None:
    rows, heads, width = q.shape
    keys, weights = np.empty((slots, width), np.float32), np.empty(slots, np.float32)
    turned, back = np.empty(width, np.float32), np.empty(cos.shape[1], np.float32)
    scale = np.float32(width**-0.5)
    for r in range(rows):
        count = _load_window(
            window_values, window_scales, window_record, window_floats, window_index[r], keys
        )
        if values.shape[0] > 0:
            pages = page_table[req_of_row[r]]
            if visible.shape[0] > 0:
                count += _load_first(
                    values, scales, record, floats, pages, visible[r], keys[count:]
                )
            else:
                count += _load_selected(
                    values, scales, record, floats, pages, selected[r], keys[count:]
                )
        for i in range(cos.shape[1]):
            back[i] = -sin[r, i]
        # Views that are made once a row, as making one takes as long as some dots.
        there, ahead, seen = cos[r], sin[r], keys[:count]
        for h in range(heads):
            result = out[r, h]
            rotate_row(q[r, h], there, ahead, turned)
            for i in range(width):
                turned[i] *= scale
            lse[r, h] = _attend_head(turned, seen, sink[h], weights, result)
            rotate_row(result, there, back, result)
