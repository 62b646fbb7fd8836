"""Norms, rotation and the insert into a cache, behind the down-projection (kernels.md 4)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases.case import Case, Rate, relative_l2, same, within
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import kv_store, norm, rope
from leadline.kernels.reference import window as reference
from leadline.kernels.triton import rope as rope_kernels
from leadline.kernels.triton import window

RANK, WIDTH, HALF, EPS = 1280, 512, 32, 1e-20
PER_PAGE = 128
WINDOW, RING, STAGING = 128, 160, 257

# Microseconds on an H200 (18.8): both norms; window insert into 528 bytes; the same kernel with the
# rotation of all queries, which is attention's here.
NORMS = {1: 1.46, 8: 1.49, 64: 1.65, 512: 2.55, 8192: 25.4}
INSERT = {1: 1.64, 8: 1.95, 64: 2.03, 512: 2.11, 8192: 6.34}
WITH_QUERIES = {1: 1.89, 8: 2.29, 64: 6.36, 512: 34.4, 8192: 286.0}


def _make(rows: int, rank: int, record: Record, device: torch.device) -> tuple[Any, ...]:
    """``down``, both weights, angles, a field, and where each row goes."""
    width = 128 if record is Record.FP4_32 else WIDTH
    pages = rows // PER_PAGE + 1
    sizes = [record.value_bytes(width), record.scale_bytes(width)]
    shape = (pages, PER_PAGE, sum(sizes))
    field = torch.zeros(shape, dtype=torch.uint8, device=device).split(sizes, dim=-1)
    down = torch.randn(rows, rank + width, device=device).bfloat16()
    weights = (torch.rand(n, device=device) + 0.5 for n in (rank, width))
    positions = torch.randint(0, 2**20, (rows,), device=device)
    angles = rope.rope_angles(positions, rope.rope_frequencies(2 * HALF, 1e4).to(device))
    place = torch.randperm(pages * PER_PAGE, device=device)[:rows]
    addresses = place // PER_PAGE, place % PER_PAGE
    return (down, *weights, *angles, RecordField(record, *field), *addresses)


def _make_angles(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    positions = torch.randint(0, 2**20, (rows,), device=device)
    return positions, rope.rope_frequencies(2 * HALF, 1e4).to(device)


def _fused(down: Tensor, query_weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    query = window.norm_query_store_window(down, query_weight, *rest, eps=EPS)
    return query, *_bytes(rest[3])


def _stored(down: Tensor, query_weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    window.norm_rotate_store(down, *rest, eps=EPS)
    return _bytes(rest[3])


def _bytes(field: RecordField) -> tuple[Tensor, ...]:
    assert field.scales is not None
    return field.values, field.scales


def _eager(down: Tensor, query_weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Separate launches; every row goes somewhere."""
    weight, cos, sin, field, outer, inner = rest
    rank = len(query_weight)
    latent = norm.rms_norm(down[:, rank:], weight, eps=EPS)
    packed = kv_store.pack_rows(rope.rotate(latent, cos, sin), field.record)
    kv_store.store_rows(field, outer, inner, *packed)
    if not rank:
        return _bytes(field)
    return norm.rms_norm(down[:, :rank], query_weight, eps=EPS), *_bytes(field)


def _alike(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Norms differ in last bits, so that 0.1 % of the codes may; the query is near."""
    *query, values, scales = zip(actual, wanted, strict=True)
    for a, b in (values, scales):
        assert (a == b).double().mean() > 0.999, f"{int((a != b).sum())} bytes differ"
    error = max((relative_l2(a, b) for a, b in query), default=0.0)
    assert error <= 2e-3, f"relative L2 error of the query is {error:.2e}"
    return error


def _down(rows: int) -> Case:
    return Case(
        kernel="4",
        op="norm_query_store_window",
        shape=f"T={rows}",
        make=partial(_make, rows, RANK, Record.FP8_32),
        fused=_fused,
        twin=_eager,
        unfused=_eager,
        check=_alike,
        bytes=rows * (2 * (RANK + WIDTH) + 2 * RANK + 528),
        flops=rows * (4 * RANK + 8 * WIDTH),
        rate=Rate.FP32,
        target_us={1: 3.1, 8: 3.4, 64: 3.5}.get(rows),
        target_share=0.75 if rows >= 8192 else None,
        peers={
            "norms, then insert": NORMS[rows] + INSERT[rows],
            "norms, then insert and query rotation": NORMS[rows] + WITH_QUERIES[rows],
        },
    )


def _store(rows: int, record: Record) -> Case:
    width = 128 if record is Record.FP4_32 else WIDTH
    return Case(
        kernel="4",
        op="norm_rotate_store",
        shape=f"{record},T={rows}",
        make=partial(_make, rows, 0, record),
        fused=_stored,
        twin=_eager,
        unfused=_eager,
        check=_alike,
        bytes=rows * (2 * width + record.num_bytes(width)),
        flops=rows * 8 * width,
        rate=Rate.FP32,
        target_us=3.5 if rows <= 64 else None,
        target_share=0.75 if rows >= 8192 else None,
        peers={"insert alone": INSERT[rows]} if record is Record.FP8_32 else {},
    )


def _geometry(rows: int, groups: int, device: torch.device) -> tuple[Tensor, ...]:
    """Rows and groups of a step as ``plan_window`` takes them, all groups of one length."""
    per_group = rows // groups
    group = torch.arange(groups, device=device)
    start = torch.randint(0, 2**19, (groups,), device=device)
    pos = (start.unsqueeze(1) + torch.arange(per_group, device=device)).flatten()
    q_off = torch.arange(groups + 1, device=device) * per_group
    return (
        *(pos, group.repeat_interleave(per_group), q_off),
        *(start + per_group, 1 + group, (start - 100).clamp(min=0)),
    )


def _make_rings(rows: int, groups: int, device: torch.device) -> tuple[Any, ...]:
    _, _, q_off, seq_len, slot, _ = _geometry(rows, groups, device)
    record = Record.FP8_32
    sizes = [record.value_bytes(WIDTH), record.scale_bytes(WIDTH)]
    shape = STAGING + rows // RING + 1, RING, sum(sizes)
    parts = torch.randint(0, 120, shape, dtype=torch.uint8, device=device).split(sizes, dim=-1)
    return RecordField(record, *parts), q_off, seq_len, slot


def _committed(how: Any, rings: RecordField, *geometry: Tensor) -> tuple[Tensor, ...]:
    how.commit_window(rings, *geometry, window=WINDOW, staging=STAGING)
    return _bytes(rings)


def _plan(rows: int, groups: int) -> Case:
    options: dict[str, Any] = {"window": WINDOW, "ring": RING, "staging": STAGING}
    return Case(
        kernel="4",
        op="plan_window",
        shape=f"T={rows},{groups} requests",
        make=partial(_geometry, rows, groups),
        fused=partial(window.plan_window, **options),
        twin=partial(reference.plan_window, **options),
        check=same,
        bytes=rows * 8 * (WINDOW + 4),
        rate=Rate.FP32,
    )


def _commit(rows: int, groups: int) -> Case:
    moved = groups * min(RING, rows // groups) if rows // groups + WINDOW > RING else 0
    return Case(
        kernel="4",
        op="commit_window",
        shape=f"T={rows},{groups} requests",
        make=partial(_make_rings, rows, groups),
        fused=partial(_committed, window),
        twin=partial(_committed, reference),
        check=same,
        bytes=max(1, moved) * 2 * 528,
        rate=Rate.FP32,
    )


def _angles(rows: int) -> Case:
    return Case(
        kernel="4",
        op="rope_angles",
        shape=f"T={rows}",
        make=partial(_make_angles, rows),
        fused=rope_kernels.rope_angles,
        twin=rope.rope_angles,
        unfused=rope.rope_angles,
        check=within(1e-6),
        bytes=rows * (8 + 2 * 4 * HALF),
        rate=Rate.FP32,
    )


CASES = [_down(rows) for rows in NORMS]
CASES += [_store(rows, Record.FP8_32) for rows in NORMS]
CASES += [_store(rows, record) for record in (Record.FP4_16, Record.FP4_32) for rows in (1, 8192)]
CASES += [_plan(*step) for step in ((1, 1), (64, 64), (8192, 4))]
CASES += [_commit(*step) for step in ((256, 256), (1024, 1), (8192, 4))]
CASES += [_angles(rows) for rows in (1, 64, 8192)]
