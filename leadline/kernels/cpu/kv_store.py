"""Cache rows: packing them into records and unpacking them again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leadline.kernels.cpu.formats import BFLOAT16, CODE_OF, decode_row, encode_row
from leadline.kernels.cpu.jit import F2, I1, U2, Packed, in_float32, kernel
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import kv_store, quant


@in_float32(kv_store.pack_rows)
def pack_rows(x: Tensor, record: Record, rotary: int = 0) -> tuple[Tensor, Tensor | None]:
    """One pass; plain records take the reference, which is a cast."""
    if CODE_OF[record] >= BFLOAT16:
        return kv_store.pack_rows(x, record)
    width = x.shape[-1]
    values = np.empty((*x.shape[:-1], record.value_bytes(width, rotary)), np.uint8)
    scales = np.empty((*x.shape[:-1], record.scale_bytes(width, rotary)), np.uint8)
    _pack(x.reshape(-1, width), CODE_OF[record], _rows(values), _rows(scales))
    return torch.from_numpy(values), torch.from_numpy(scales)


def _rows(x: NDArray[Any]) -> NDArray[Any]:
    return x.reshape(-1, x.shape[-1])


@kernel
def _pack(x: F2, record: int, values: U2, scales: U2) -> None:
    for r in range(x.shape[0]):
        encode_row(x[r], values[r], scales[r], record)


def unpack_rows(
    values: Tensor, scales: Tensor | None, record: Record, dtype: torch.dtype, rotary: int = 0
) -> Tensor:
    """One pass over packed rows in float32."""
    if scales is None or dtype != torch.float32:
        return kv_store.unpack_rows(values, scales, record, dtype, rotary)
    num_channels = values.shape[-1] - rotary  # one byte each, those of two but for the second
    if record in (Record.FP4_16, Record.FP4_32):
        num_channels *= 2
    out = np.empty((*values.shape[:-1], num_channels), np.float32)
    _unpack(values.flatten(0, -2), scales.flatten(0, -2), CODE_OF[record], _rows(out))
    return torch.from_numpy(out)


@kernel
def _unpack(values: U2, scales: U2, record: int, out: F2) -> None:
    for r in range(out.shape[0]):
        decode_row(values[r], scales[r], record, out[r])


@in_float32(quant.round_trip_fp4_32)
def quantize_index_query(q: Tensor) -> Tensor:
    """Packed as the keys are, and unpacked again."""
    return unpack_rows(*pack_rows(q, Record.FP4_32), Record.FP4_32, q.dtype)


def store_rows(
    field: RecordField,
    outer: Tensor,
    inner: Tensor,
    values: Tensor,
    scales: Tensor | None,
    *,
    rows: Tensor | None = None,
) -> None:
    """Values and scales in one pass."""
    if field.scales is None or scales is None:
        kv_store.store_rows(field, outer, inner, values, scales, rows=rows)
        return
    if rows is None:
        rows = torch.arange(len(outer))
    _store(field.values.numpy(), field.scales.numpy(), outer, inner, values, scales, rows)


@kernel
def _store(
    field_values: Packed,
    field_scales: Packed,
    outer: I1,
    inner: I1,
    values: U2,
    scales: U2,
    rows: I1,
) -> None:
    for k in range(rows.shape[0]):
        for i in range(values.shape[1]):
            field_values[outer[k], inner[k], i] = values[rows[k], i]
        for i in range(scales.shape[1]):
            field_scales[outer[k], inner[k], i] = scales[rows[k], i]
