"""The router (kernels.md 2)."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_cases.case import Case, relative_l2
from leadline.kernels.reference import router as reference
from leadline.kernels.triton import router

D, E, K, SCALE = 5120, 384, 6, 1.5
V4_D, V4_E, VOCAB = 4096, 256, 129280  # of V4-Flash, whose first three layers route by token

# Microseconds on an H200 (18.9): cuBLAS with a float32 result and topk_softplus_sqrt.
PEER = {1: 11.9, 8: 11.9, 64: 12.9, 512: 15.1, 8192: 72.8}


def _make(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(rows, D, device=device).bfloat16()
    gate = (torch.randn(E, D, device=device) / D**0.5).bfloat16()
    return x, gate, 0.1 * torch.randn(E, device=device)


def _make_mixed(rows: int, device: torch.device) -> tuple[Tensor | None, ...]:
    """Every other row is of an image."""
    images = torch.arange(rows, device=device) % 2 == 1
    return *_make(rows, device), None, images, 0.1 * torch.randn(E, device=device)


def _make_hashed(rows: int, device: torch.device) -> tuple[Tensor, ...]:
    x = torch.randn(rows, V4_D, device=device).bfloat16()
    gate = (torch.randn(V4_E, V4_D, device=device) / V4_D**0.5).bfloat16()
    table = torch.rand(VOCAB, V4_E, device=device).argsort(-1)[:, :K].contiguous()
    return x, gate, table, torch.randint(0, VOCAB, (rows,), device=device).int()


def _exact(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    req_of_row: Tensor | None = None,
    image_rows: Tensor | None = None,
    image_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    wide = x.double(), gate.double(), bias.double(), req_of_row, image_rows, image_bias
    return reference.route(*wide, num_experts_per_tok=K, scale=SCALE)


def _exact_hashed(
    x: Tensor, gate: Tensor, tid2eid: Tensor, token_ids: Tensor
) -> tuple[Tensor, Tensor]:
    return reference.hash_route(x.double(), gate.double(), tid2eid, token_ids, scale=SCALE)


def _eager(x: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.softplus(torch.mm(x, gate.T, out_dtype=torch.float32)).sqrt()
    ids = torch.topk(scores + bias, K).indices.sort(-1).values
    weights = scores.gather(-1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * SCALE


def _alike(actual: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    """Fewer than 0.1 % of the rows may choose other experts, where two are all but equal."""
    same = (actual[0] == wanted[0]).all(-1)
    assert same.double().mean() > 0.999, f"{int((~same).sum())} rows chose other experts"
    error = relative_l2(actual[1][same], wanted[1][same])
    assert error <= 1e-5, f"relative L2 error of the weights is {error:.2e}"
    return error


CASES = [
    Case(
        kernel="2",
        op="route",
        shape=f"T={rows}",
        make=functools.partial(_make, rows),
        fused=functools.partial(router.route, num_experts_per_tok=K, scale=SCALE),
        twin=_exact,
        unfused=_eager,
        check=_alike,
        bytes=rows * (2 * D + 12 * K) + 2 * E * D,
        flops=2 * E * D * rows,
        target_us=5.0 if rows <= 64 else us / 1.2,
        peers={"cuBLAS + topk_softplus_sqrt": us},
    )
    for rows, us in PEER.items()
]
CASES += [
    Case(
        kernel="2",
        op="route",
        shape=f"image rows,T={rows}",
        make=functools.partial(_make_mixed, rows),
        fused=functools.partial(router.route, num_experts_per_tok=K, scale=SCALE),
        twin=_exact,
        check=_alike,
        bytes=rows * (2 * D + 12 * K + 1) + 2 * E * D,
        flops=2 * E * D * rows,
    )
    for rows in (8, 8192)
]
CASES += [
    Case(
        kernel="2",
        op="hash_route",
        shape=f"V4,T={rows}",
        make=functools.partial(_make_hashed, rows),
        fused=functools.partial(router.hash_route, scale=SCALE),
        twin=_exact_hashed,
        check=_alike,
        bytes=rows * (2 * V4_D + 20 * K) + 2 * V4_E * V4_D,
        flops=2 * V4_E * V4_D * rows,
    )
    for rows in (8, 8192)
]
