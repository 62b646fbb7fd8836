"""Index queries, dense scores and candidate scores (kernels.md 5, 6), 32 heads of 128 channels."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases.case import Case, Rate, relative_l2, same
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import indexer as reference
from leadline.kernels.reference.quant import round_trip_fp4_32
from leadline.kernels.reference.rope import rotate
from leadline.kernels.triton import indexer

HEADS, WIDTH, PER_PAGE = 32, 128, 256
BLOCK_SIZE, BLOCKS = 8, 2048
K = 1024
# DeepGEMM over FP8 keys, and over FP4 keys SGLang's Triton kernel, the latter also with a mask of
# candidates: microseconds by (S / K, T), kernels.md 18.5.
DEEPGEMM_FP8 = {
    (8, 1): 2.94,
    (8, 8): 5.49,
    (8, 32): 12.6,
    (64, 1): 5.44,
    (64, 8): 21.9,
    (64, 32): 73.8,
    (512, 1): 21.8,
    (512, 8): 142.0,
    (512, 32): 539.0,
    (1024, 1): 39.0,
    (1024, 8): 280.0,
    (1024, 32): 1079.0,
}
SGLANG_FP4 = {
    (8, 1): 7.53,
    (8, 8): 42.0,
    (8, 32): 155.0,
    (64, 1): 41.0,
    (64, 8): 271.0,
    (64, 32): 1223.0,
    (512, 1): 273.0,
    (512, 8): 2123.0,
    (512, 32): 9727.0,
    (1024, 1): 533.0,
    (1024, 8): 4247.0,
    (1024, 32): 19429.0,
}
SGLANG_MASKED = {(512, 1): 296.0, (512, 8): 2161.0, (1024, 1): 559.0, (1024, 8): 4364.0}
DEEPGEMM_RAGGED = {(512, 64): 287.0, (2048, 8): 155.0}


def _keys(requests: int, entries: int, device: torch.device) -> tuple[RecordField, Tensor]:
    """Random records on shuffled pages, laid out as the cache does, and their page table."""
    pages = requests * entries // PER_PAGE
    data = torch.randint(256, (pages, PER_PAGE * 68), dtype=torch.uint8, device=device)
    values, scales = data.split((PER_PAGE * 64, PER_PAGE * 4), dim=1)
    scales.remainder_(6).add_(122)
    field = RecordField(
        Record.FP4_32, values.unflatten(1, (PER_PAGE, 64)), scales.unflatten(1, (PER_PAGE, 4))
    )
    return field, torch.randperm(pages, device=device).view(requests, -1)


def _queries(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    q = torch.randn(rows, HEADS, WIDTH, device=device, dtype=torch.bfloat16)
    weights = torch.randn(rows, HEADS, device=device, dtype=torch.bfloat16) / 64
    return round_trip_fp4_32(q), weights


def _make_dense(rows: int, requests: int, entries: int, device: torch.device) -> tuple[Any, ...]:
    keys, table = _keys(requests, entries, device)
    group = torch.arange(rows, device=device) * requests // rows
    visible = torch.full((rows,), entries, device=device)
    return *_queries(rows, device), keys, table, group, visible, entries


def _make_candidates(rows: int, entries: int, device: torch.device) -> tuple[Any, ...]:
    q, weights, keys, table, group, visible, _ = _make_dense(rows, rows, entries, device)
    chance = torch.rand(rows, entries // BLOCK_SIZE, device=device)
    blocks = chance.topk(BLOCKS).indices.sort().values
    return q, weights, keys, table, group, blocks, visible


def _dense_then_gather(
    q: Tensor,
    weights: Tensor,
    keys: RecordField,
    table: Tensor,
    group: Tensor,
    blocks: Tensor,
    visible: Tensor,
) -> Tensor:
    """What candidates save: our own scores of everything, of which some are kept."""
    scores = indexer.index_logits(
        *(q, weights, keys, table, group, visible, table.shape[1] * PER_PAGE),
        exact_rounding=False,
    )
    inside = torch.arange(BLOCK_SIZE, device=q.device)
    return scores.gather(1, (blocks.unsqueeze(2) * BLOCK_SIZE + inside).flatten(1))


def _agree(actual: Tensor, wanted: Tensor) -> float:
    """kernels.md 5.2; scores are bf16, so a few differ in their last bit."""
    assert torch.equal(actual == -torch.inf, wanted == -torch.inf), "other entries are visible"
    error = relative_l2(actual.clamp(min=-1e30), wanted.clamp(min=-1e30))
    assert error <= 1e-3, f"relative L2 error is {error:.2e}"
    return error


def _make_query(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(rows, HEADS, WIDTH, device=device, dtype=torch.bfloat16)
    angle = torch.rand(rows, 32, device=device) * 6.3
    return q, angle.cos(), angle.sin()


def _rotate_then_round(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return round_trip_fp4_32(rotate(q, cos, sin))


def _dense(exact: bool) -> dict[str, Any]:
    return {
        "fused": functools.partial(indexer.index_logits, exact_rounding=exact),
        "twin": functools.partial(reference.index_logits, exact_rounding=exact),
        "check": _agree,
        "rate": Rate.FP8,
    }


CASES = [
    Case(
        kernel="5.1",
        op="prepare_index_query",
        shape=f"T={rows}",
        make=functools.partial(_make_query, rows),
        fused=indexer.prepare_index_query,
        twin=reference.prepare_index_query,
        unfused=_rotate_then_round,
        check=same,
        bytes=rows * (4 * HEADS * WIDTH + 256),
        rate=Rate.FP32,
    )
    for rows in (1, 32, 8192)
]
CASES += [
    Case(
        kernel="5",
        op="index_logits",
        shape=f"S={s}K,T={rows}" + (",exact" if exact else ""),
        make=functools.partial(_make_dense, rows, rows, s * K),
        **_dense(exact),
        bytes=rows * s * K * (68 + 2),
        flops=8192 * rows * s * K,
        target_us=DEEPGEMM_FP8[s, rows] / (1.5 if s >= 64 else 1.0),
        peers={"DeepGEMM, FP8 keys": DEEPGEMM_FP8[s, rows], "SGLang, FP4": SGLANG_FP4[s, rows]},
    )
    for s, rows, exact in (
        *((s, rows, False) for s in (8, 64, 512, 1024) for rows in (1, 8, 32)),
        (64, 8, True),
        (1024, 1, True),
    )
]
CASES += [
    Case(
        kernel="5",
        op="index_logits",
        shape=f"{rows}x{s * K}" + (",exact" if exact else ""),
        make=functools.partial(_make_dense, rows, 1, s * K),
        **_dense(exact),
        bytes=s * K * 68 + rows * (s * K * 2 + 2 * HEADS * WIDTH),
        flops=8192 * rows * s * K,
        target_share=0.6,
        peers={"DeepGEMM, FP8 keys": DEEPGEMM_RAGGED[rows, s]},
    )
    for rows, s, exact in ((512, 64, False), (2048, 8, False), (2048, 8, True))
]
CASES += [
    Case(
        kernel="6",
        op="candidate_logits",
        shape=f"S={s}K,T={rows}",
        make=functools.partial(_make_candidates, rows, s * K),
        fused=functools.partial(
            indexer.candidate_logits, block_size=BLOCK_SIZE, exact_rounding=False
        ),
        twin=functools.partial(
            reference.candidate_logits, block_size=BLOCK_SIZE, exact_rounding=False
        ),
        unfused=_dense_then_gather,
        check=_agree,
        bytes=rows * (BLOCKS * BLOCK_SIZE * (68 + 2) + 8192),
        flops=8192 * rows * BLOCKS * BLOCK_SIZE,
        rate=Rate.FP8,
        target_us=12.0 if rows == 1 else None,
        target_share=0.55 if rows >= 8 else None,
        peers={"DeepGEMM, all FP8 keys": DEEPGEMM_FP8[s, rows]}
        | ({"SGLang, masked FP4": SGLANG_MASKED[s, rows]} if (s, rows) in SGLANG_MASKED else {}),
    )
    for s in (512, 1024)
    for rows in (1, 8, 32)
]
