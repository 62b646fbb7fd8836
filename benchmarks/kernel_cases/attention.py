"""Sparse attention over packed records (kernels.md 8): 128 window rows and 512 selected entries."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases.case import Case, same, within
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import attention as reference
from leadline.kernels.reference import quant
from leadline.kernels.reference.indexer import entry_address
from leadline.kernels.reference.kv_store import load_rows
from leadline.kernels.reference.rope import rope_angles, rope_frequencies, rotate
from leadline.kernels.triton import attention

HEADS, WIDTH, ROPE, WINDOW, SELECTED, RING, PER_PAGE = 64, 512, 64, 128, 512, 256, 128
CONTEXT = 50_000  # entries: 100K tokens at ratio 2
_MAX_GROUPS = 32  # more rows than that are a prefill of one request

# FlashMLA over 584-byte records: with its kernels before and after, and alone (18.2). Above
# T = 512 its sparse prefill over bf16, whose gather is not counted.
_CHAIN = {1: 18.3, 8: 22.6, 32: 36.6, 128: 70.7, 512: 236.0}
_DECODE = {1: 15.2, 8: 17.0, 32: 26.6, 128: 45.7, 512: 172.0}
_PREFILL = {128: 28.3, 512: 101.0, 4096: 771.0}


def _make_field(record: Record, outer: int, inner: int, device: torch.device) -> RecordField:
    """Random bytes of moderate scales: rows of a context need not be quantised one by one."""
    if record is Record.BFLOAT16:
        values = torch.randn(outer, inner, WIDTH, device=device, dtype=torch.bfloat16)
        return RecordField(record, values, None)
    num_values, num_scales = record.value_bytes(WIDTH), record.scale_bytes(WIDTH)
    shape = (outer, inner, num_values + num_scales)
    data = torch.randint(0, 256, shape, device=device, dtype=torch.uint8)
    values, scales = data.split((num_values, num_scales), dim=2)
    if record is Record.FP4_16:  # E4M3 scales of 0.25 to 0.5
        scales.bitwise_and_(7).bitwise_or_(0x28)
    else:  # values below 2
        values.bitwise_and_(0xBF)
        scales.bitwise_and_(1).add_(127)
    return RecordField(record, values, scales)


def _make(
    rows: int, heads: int, window: Record, kv: Record | None, device: torch.device
) -> tuple[Any, ...]:
    """A decode step of so many requests over its rings; above 32 rows, a prefill."""
    groups = rows if rows <= _MAX_GROUPS else 1
    group = torch.arange(rows, device=device) % groups
    newest = torch.arange(rows, device=device) + WINDOW
    if groups > 1 or rows == 1:
        index = newest.unsqueeze(1) + torch.arange(WINDOW, device=device)
        index = group.unsqueeze(1) * RING + index % RING
        rings = _make_field(window, groups, RING, device)
    else:
        index = newest.unsqueeze(1) - torch.arange(WINDOW - 1, -1, -1, device=device)
        rings = _make_field(window, 1, rows + WINDOW, device)
    pages = -(-CONTEXT // PER_PAGE)
    table = torch.randperm(groups * pages, device=device).view(groups, pages)
    chosen = None
    if kv is not None:
        scores = torch.rand(rows, CONTEXT, device=device)
        chosen = scores.topk(SELECTED, sorted=False).indices.sort(-1).values
    positions = 2 * CONTEXT - rows + torch.arange(rows, device=device)
    return (
        torch.randn(rows, heads, WIDTH, device=device, dtype=torch.bfloat16),
        *rope_angles(positions, rope_frequencies(ROPE, 160000.0).to(device)),
        rings,
        index,
        torch.full((rows,), WINDOW, device=device),
        None if kv is None else _make_field(kv, groups * pages, PER_PAGE, device),
        table,
        group,
        chosen,
        torch.randn(heads, device=device),
    )


def _unfused(
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
) -> Tensor:
    """Separate launches: gather and expand, rotate, two products with a softmax between, rotate."""
    inner = window.values.shape[1]
    keys = load_rows(window, window_index // inner, window_index % inner, q.dtype)
    if kv is not None and selected is not None:
        address = entry_address(selected, page_table[req_of_row], kv.values.shape[1])
        keys = torch.cat((keys, load_rows(kv, *address, q.dtype)), dim=1)
    scores = rotate(q, cos, sin) @ keys.transpose(1, 2) * q.shape[2] ** -0.5
    bias = sink.to(q.dtype).view(1, -1, 1).expand(len(q), -1, 1)
    weights = torch.cat((scores, bias), dim=2).softmax(-1)[..., :-1]
    return rotate(weights @ keys, cos, sin, inverse=True)


def _with_all(
    attend: Callable[..., Tensor], *arguments: Any
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Outputs, logarithms of what they were divided by, and outputs in MXFP8."""
    q = arguments[0]
    lse = torch.empty(q.shape[:2], device=q.device, dtype=torch.float32)
    codes = torch.empty(q.shape, device=q.device, dtype=torch.uint8)
    fp8 = codes, codes.new_empty(*q.shape[:2], WIDTH // 32)
    return attend(*arguments, exact_rounding=False, lse=lse, fp8=fp8), lse, fp8


def _check_all(actual: tuple[Any, ...], wanted: tuple[Any, ...]) -> float:
    """Bounds of 8.7; codes and exponents are held to the kernel's own rounded outputs."""
    out, lse, fp8 = actual
    torch.testing.assert_close(lse, wanted[1], rtol=0, atol=1e-4)
    same(fp8, quant.quantize_fp8_32(out))
    return within(4e-3)(out, wanted[0])


def _case_of_all(rows: int) -> Case:
    """The case of so many rows with both optional outputs."""
    plain = _case(rows)
    return dataclasses.replace(
        plain,
        shape=f"{plain.shape},lse,fp8",
        fused=functools.partial(_with_all, attention.sparse_attention),
        twin=functools.partial(_with_all, reference.sparse_attention),
        check=_check_all,
        bytes=plain.bytes + rows * HEADS * (4 + WIDTH + WIDTH // 32),
        unfused=None,
    )


def _case(
    rows: int,
    *,
    heads: int = HEADS,
    window: Record = Record.FP8_32,
    kv: Record | None = Record.FP4_16,
    peers: dict[str, float] | None = None,
    target_us: float | None = None,
    target_share: float | None = None,
) -> Case:
    keys, num_bytes = WINDOW, WINDOW * window.num_bytes(WIDTH) + heads * WIDTH * 4
    if kv is not None:
        keys, num_bytes = keys + SELECTED, num_bytes + SELECTED * kv.num_bytes(WIDTH)
    names = "window only" if kv is None else kv
    return Case(
        kernel="8",
        op="sparse_attention",
        shape=f"T={rows},H={heads},{names}",
        make=functools.partial(_make, rows, heads, window, kv),
        fused=functools.partial(attention.sparse_attention, exact_rounding=False),
        twin=functools.partial(reference.sparse_attention, exact_rounding=False),
        check=within(4e-3),
        bytes=rows * num_bytes,
        flops=rows * keys * heads * WIDTH * 4,
        target_us=target_us,
        target_share=target_share,
        peers=peers or {},
        unfused=_unfused if rows <= 512 else None,
    )


def _peers(rows: int) -> dict[str, float]:
    tables = {"chain": _CHAIN, "FlashMLA decode": _DECODE, "FlashMLA prefill": _PREFILL}
    return {name: table[rows] for name, table in tables.items() if rows in table}


_TARGETS_US = {1: 14.0, 8: 17.4, 32: 28.1, 128: 54.4, 512: 100.0, 4096: 592.0}

CASES = [
    *(_case(rows, peers=_peers(rows), target_us=us) for rows, us in _TARGETS_US.items()),
    *(_case(rows, kv=Record.FP8_32, peers=_peers(rows)) for rows in (1, 128, 4096)),
    _case(128, window=Record.BFLOAT16, kv=Record.BFLOAT16),
    *(_case(rows, heads=16, target_share=0.6) for rows in (8, 64, 512)),
    _case(1, kv=None, peers={"FlashMLA decode": 12.1}),
    _case(128, kv=None, peers={"FlashMLA decode": 15.8}),
    *(_case_of_all(rows) for rows in (1, 128)),
]
