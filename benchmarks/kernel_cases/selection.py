"""Selection of entries and of candidate blocks (kernels.md 7), of bf16 scores."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from benchmarks.kernel_cases.case import Case, Rate, same
from leadline.kernels.reference import indexer as reference
from leadline.kernels.triton import selection

K = 1024
TOPK, BLOCK_SIZE, BLOCKS = 512, 8, 2048
# SGLang's two kernels, vLLM's persistent one and torch: microseconds by (N / K, rows), 18.6.
NAMES = ("SGLang v2", "cooperative", "persistent", "torch.topk")
TOP_K = {
    (8, 1): (3.79, 4.41, 8.91, 37.7),
    (8, 8): (3.91, 4.55, 8.00, 42.9),
    (8, 64): (4.09, 4.74, 5.00, 48.6),
    (64, 1): (6.65, 9.57, 20.9, 45.2),
    (64, 8): (7.07, 9.92, 23.6, 51.9),
    (64, 64): (16.0, 18.3, 26.3, 100.0),
    (128, 1): (7.20, 11.4, 22.2, 51.3),
    (128, 8): (7.92, 11.7, 23.7, 63.6),
    (128, 64): (28.2, 29.0, 38.0, 147.0),
    (512, 1): (10.3, 24.5, 23.2, 83.8),
    (512, 8): (17.2, 26.5, 90.7, 100.0),
    (512, 64): (94.4, 79.5, 149.0, 445.0),
    (1024, 1): (14.8, 40.4, 24.1, 110.0),
    (1024, 8): (27.4, 42.0, 181.0, 145.0),
    (1024, 64): (170.0, 142.0, 289.0, 817.0),
}
CANDIDATES = {  # of 16 K columns
    1: (5.49, 6.32, 11.2, 66.7),
    8: (5.76, 6.41, 10.4, 74.1),
    64: (5.99, 6.68, 7.09, 60.1),
}
BEST_BLOCKS = {
    (64, 1): 5.22,
    (64, 8): 5.82,
    (64, 32): 9.28,
    (128, 1): 9.11,
    (128, 8): 11.0,
    (128, 32): 17.2,
    (512, 1): 7.75,
    (512, 8): 14.8,
    (512, 32): 41.2,
    (1024, 1): 8.58,
    (1024, 8): 20.1,
    (1024, 32): 61.4,
}


def _scores(rows: int, columns: int, device: torch.device) -> tuple[Tensor]:
    return (torch.randn(rows, columns, device=device, dtype=torch.bfloat16),)


def _candidates(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    blocks = torch.rand(rows, 16 * BLOCKS, device=device).topk(BLOCKS).indices.sort().values
    return *_scores(rows, BLOCKS * BLOCK_SIZE, device), blocks


def _visible(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return *_scores(rows, columns, device), torch.full((rows,), columns, device=device)


def _within(
    rows: int, visible: int, columns: int, device: torch.device
) -> tuple[Tensor, int, Tensor]:
    """As graphs have it: room for the longest request, of which little is filled."""
    return _scores(rows, columns, device)[0], TOPK, torch.full((rows,), visible, device=device)


def _sorted_topk(scores: Tensor) -> Tensor:
    """Without the rule for ties, which torch has not."""
    return scores.topk(TOPK).indices.sort().values


def _sorted_topk_blocks(scores: Tensor, visible: Tensor) -> Tensor:
    best: Tensor = scores.unflatten(1, (-1, BLOCK_SIZE)).amax(-1)
    return best.topk(BLOCKS).indices.sort().values


CASES = [
    Case(
        kernel="7",
        op="select_top_k",
        shape=f"{rows}x{n}K",
        make=functools.partial(_scores, rows, n * K),
        fused=functools.partial(selection.select_top_k, k=TOPK),
        twin=functools.partial(reference.select_top_k, k=TOPK),
        unfused=_sorted_topk,
        check=same,
        bytes=rows * (2 * n * K + 4 * TOPK),
        rate=Rate.FP32,
        target_us=min(TOP_K[n, rows]) / (1.2 if n >= 64 else 1.0),
        peers=dict(zip(NAMES, TOP_K[n, rows], strict=True)),
    )
    for n, rows in TOP_K
]
CASES += [
    Case(
        kernel="7",
        op="select_top_k",
        shape=f"{rows}x{n}K of 512K",
        make=functools.partial(_within, rows, n * K, 512 * K),
        fused=selection.select_top_k,
        twin=reference.select_top_k,
        check=same,
        bytes=rows * (2 * n * K + 4 * TOPK),
        rate=Rate.FP32,
    )
    for n, rows in ((8, 1), (8, 32), (64, 8))
]
CASES += [
    Case(
        kernel="7",
        op="select_from_candidates",
        shape=f"{rows}x16K",
        make=functools.partial(_candidates, rows),
        fused=functools.partial(selection.select_from_candidates, k=TOPK, block_size=BLOCK_SIZE),
        twin=functools.partial(reference.select_from_candidates, k=TOPK, block_size=BLOCK_SIZE),
        check=same,
        bytes=rows * (2 * BLOCKS * BLOCK_SIZE + 8 * TOPK),
        rate=Rate.FP32,
        target_us=min(CANDIDATES[rows]),
        peers=dict(zip(NAMES, CANDIDATES[rows], strict=True)),
    )
    for rows in CANDIDATES
]
CASES += [
    Case(
        kernel="7",
        op="select_candidate_blocks",
        shape=f"{rows}x{n}K",
        make=functools.partial(_visible, rows, n * K),
        fused=functools.partial(
            selection.select_candidate_blocks, block_size=BLOCK_SIZE, topk_blocks=BLOCKS
        ),
        twin=functools.partial(
            reference.select_candidate_blocks, block_size=BLOCK_SIZE, topk_blocks=BLOCKS
        ),
        unfused=_sorted_topk_blocks,
        check=same,
        bytes=rows * (2 * n * K + 8 * BLOCKS),
        rate=Rate.FP32,
        target_us=BEST_BLOCKS[n, rows] / 1.2,
        peers={"block maximum + top 2048": BEST_BLOCKS[n, rows]},
    )
    for n, rows in BEST_BLOCKS
]
