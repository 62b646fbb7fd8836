"""Cache rows: packing them into records and unpacking them again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

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


def pack_rows(x: Tensor, record: Record, rotary: int = 0) -> tuple[Tensor, Tensor | None]:
    """Quantise rows as a field of this record stores them (section 4, kernels.md 0.2).

    Those of FP8_64 end with their rotary channels in bf16, and their scales with zero bytes
    (v4-model 4.3).

    Args:
        x: ``[..., n]`` activations; quantisers take them in float32.
        record: how the destination stores a row.
        rotary: ``rotary`` of the destination.

    Returns:
        Values ``[..., value bytes]`` and scales ``[..., scale bytes]``, both uint8; for a plain
        record the values ``[..., n]`` in its dtype, and None.
    """
    if record in _PLAIN:
        return x.to(_PLAIN[record]), None
    if record is not Record.FP8_64:
        return _QUANTIZE[record](x)
    channels = x.shape[-1]
    head, tail = x.float().split((channels - rotary, rotary), dim=-1)
    codes, scales = quant.quantize_fp8_64(head)
    padding = record.scale_bytes(channels, rotary) - scales.shape[-1]
    values = torch.cat((codes, tail.bfloat16().view(torch.uint8)), dim=-1)
    return values, pad(scales, (0, padding))


def unpack_rows(
    values: Tensor, scales: Tensor | None, record: Record, dtype: torch.dtype, rotary: int = 0
) -> Tensor:
    """Dequantise rows: the inverse of ``pack_rows`` (section 4).

    Args:
        values: ``[..., value bytes]`` uint8, or ``[..., n]`` of a plain record.
        scales: ``[..., scale bytes]`` uint8, or None with a plain record.
        record: how the rows are stored.
        dtype: of activations; every packed value is exact in bf16.
        rotary: ``rotary`` of the field that they are of.

    Returns:
        ``[..., n]`` activations.
    """
    if scales is None:
        return values.to(dtype)
    if record is Record.FP8_64:
        codes, tail = values.split((values.shape[-1] - 2 * rotary, 2 * rotary), dim=-1)
        head = quant.dequantize_fp8_64(codes, scales[..., : codes.shape[-1] // 64])
        return torch.cat((head, tail.contiguous().view(torch.bfloat16).float()), dim=-1).to(dtype)
    return _DEQUANTIZE[record](values, scales).to(dtype)


def store_rows(
    field: RecordField,
    outer: Tensor,
    inner: Tensor,
    values: Tensor,
    scales: Tensor | None,
    *,
    rows: Tensor | None = None,
) -> None:
    """Write packed rows into a cache field, in place.

    Args:
        field: pages or rings.
        outer: ``[k]`` int64 page ids or slots.
        inner: ``[k]`` int64 entries of the page or rows of the ring; no address may come twice.
        values: ``[m, ...]``, with ``scales`` as ``pack_rows`` returned them for this record.
        scales: ``[m, ...]``, or None.
        rows: ``[k]`` int64, which of the m rows are written; None writes all, m being k.
    """
    field.values[outer, inner] = values if rows is None else values[rows]
    if field.scales is not None and scales is not None:
        field.scales[outer, inner] = scales if rows is None else scales[rows]


def load_rows(field: RecordField, outer: Tensor, inner: Tensor, dtype: torch.dtype) -> Tensor:
    """Read rows of a cache field and unpack them.

    Args:
        field: pages or rings.
        outer: int64 page ids or slots, of any shape.
        inner: int64 entries or ring rows, of the same shape (or one that broadcasts to it).
        dtype: of activations.

    Returns:
        ``[*shape, n]`` activations; whatever lies there, NaN too.
    """
    return unpack_rows(*field.gather(outer, inner), field.record, dtype, field.rotary)
