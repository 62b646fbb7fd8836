"""Cache rows: packing them into records and unpacking them again."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import quant

_QUANTIZE = {
    Record.FP8_32: quant.quantize_fp8_32,
    Record.FP4_16: quant.quantize_fp4_16,
    Record.FP4_32: quant.quantize_fp4_32,
}
_DEQUANTIZE = {
    Record.FP8_32: quant.dequantize_fp8_32,
    Record.FP4_16: quant.dequantize_fp4_16,
    Record.FP4_32: quant.dequantize_fp4_32,
}
_PLAIN = {Record.BFLOAT16: torch.bfloat16, Record.FLOAT32: torch.float32}


def pack_rows(x: Tensor, record: Record) -> tuple[Tensor, Tensor | None]:
    """Values and scales as a field of this record holds them."""
    if record in _PLAIN:
        return x.to(_PLAIN[record]), None
    return _QUANTIZE[record](x)


def unpack_rows(
    values: Tensor, scales: Tensor | None, record: Record, dtype: torch.dtype
) -> Tensor:
    """Inverse of ``pack_rows``, exact in every activation dtype."""
    if scales is None:
        return values.to(dtype)
    return _DEQUANTIZE[record](values, scales).to(dtype)


def store_rows(
    field: RecordField, outer: Tensor, inner: Tensor, values: Tensor, scales: Tensor | None
) -> None:
    """Write packed rows at ``[outer, inner]``."""
    field.values[outer, inner] = values
    if field.scales is not None and scales is not None:
        field.scales[outer, inner] = scales


def load_rows(field: RecordField, outer: Tensor, inner: Tensor, dtype: torch.dtype) -> Tensor:
    """Read and unpack the rows at ``[outer, inner]``."""
    scales = None if field.scales is None else field.scales[outer, inner]
    return unpack_rows(field.values[outer, inner], scales, field.record, dtype)
