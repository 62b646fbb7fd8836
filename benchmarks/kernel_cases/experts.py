"""Routed experts with MXFP4 weights (kernels.md 10, 18.3)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.kernel_cases.case import Case, Rate, within
from leadline.kernels.packed import PackedWeight, WeightFormat
from leadline.kernels.reference import experts as reference
from leadline.kernels.triton import experts

WIDTH, TOP_K, LIMIT = 5120, 6, 10.0


@dataclass(frozen=True)
class Layout:
    """What one GPU holds: all of some experts, or a slice of each."""

    name: str
    num_experts: int
    expert_width: int

    @property
    def expert_bytes(self) -> float:
        """Half a byte a weight, and a scale for 32 of them."""
        return 3 * WIDTH * self.expert_width * 17 / 32

    def stack(self, out: int, columns: int, device: torch.device) -> PackedWeight:
        """Random codes, and scales that let neither SwiGLU's clamp nor its slope decide alone."""
        codes = torch.empty(self.num_experts, out, columns // 16, dtype=torch.int64, device=device)
        codes.random_(-(2**63), None)
        scales = torch.randint(
            116,
            123,
            (self.num_experts, out, columns // 32),
            dtype=torch.uint8,
            device=device,
        )
        return PackedWeight(codes.view(torch.uint8), scales, WeightFormat.MXFP4)


EP4 = Layout("EP4", num_experts=96, expert_width=2304)
TP4 = Layout("TP4", num_experts=384, expert_width=576)


def _ids(rows: int, active: int, num_experts: int) -> Tensor:
    """``[rows, TOP_K]`` ascending: uniform choices among ``active`` experts, each chosen once."""
    among = torch.randperm(num_experts)[:active]
    scores = torch.rand(rows, active)
    column = torch.arange(active)
    scores[column // TOP_K, column] += 1
    return among[scores.topk(TOP_K).indices].sort().values


def _make(
    layout: Layout, rows: int, active: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, PackedWeight, PackedWeight]:
    x = torch.randn(rows, WIDTH, device=device, dtype=torch.bfloat16)
    ids = _ids(rows, active, layout.num_experts).to(device)
    weights = torch.rand(rows, TOP_K, device=device) + 0.1
    w13 = layout.stack(2 * layout.expert_width, WIDTH, device)
    w2 = layout.stack(WIDTH, layout.expert_width, device)
    return x, ids, weights, w13, w2


def _definition(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    *,
    row_scales: bool,
) -> Tensor:
    """Products in float32, so that their sums are: a library's bf16 products may round parts."""
    w13, w2 = (replace(weight, dtype=torch.float32) for weight in (w13, w2))
    return reference.routed_experts(x, ids, weights, w13, w2, limit=LIMIT, row_scales=row_scales)


def _case(
    layout: Layout,
    rows: int,
    active: int,
    peers: Mapping[str, float],
    *,
    fp8: bool = False,
    target_us: float | None = None,
    target_share: float | None = None,
) -> Case:
    """``fp8``: inputs of the products are E4M3 with a scale a row, else they are bf16."""
    pairs = rows * TOP_K
    return Case(
        kernel="10",
        op="routed_experts",
        shape=f"{layout.name},{'W4A8,' if fp8 else ''}T={rows}",
        make=functools.partial(_make, layout, rows, active),
        fused=functools.partial(experts.routed_experts, limit=LIMIT, row_scales=fp8),
        twin=functools.partial(_definition, row_scales=fp8),
        # Sums of 14 bits move a hidden row's codes to their neighbours more often.
        check=within(1e-2 if fp8 else 3e-3),
        bytes=active * layout.expert_bytes + pairs * (4 * WIDTH + 8 * layout.expert_width),
        flops=6 * pairs * WIDTH * layout.expert_width,
        rate=Rate.FP8 if fp8 else Rate.BF16,
        target_us=target_us,
        target_share=target_share,
        peers=peers,
    )


def _peers(marlin: float, triton_kernels: float, bf16: float | None = None) -> dict[str, float]:
    peers = {"Marlin": marlin, "triton_kernels": triton_kernels}
    return peers | ({"torch bf16": bf16} if bf16 else {})


_fp8_case = functools.partial(_case, EP4, active=96, fp8=True, target_share=0.55)
# Not the same work: weights of eight bits are twice the bytes, and need no expansion.
_FP8_PEER = "DeepGEMM, 8-bit weights"

CASES = [
    _case(EP4, 1, 6, _peers(67.3, 62.7, 186), target_us=51.8),
    _case(EP4, 2, 12, _peers(103, 99.3), target_us=79.2),
    _case(EP4, 8, 40, _peers(289, 268, 1017), target_share=0.75),
    _case(EP4, 16, 62, _peers(438, 401), target_us=337),
    _case(EP4, 32, 86, _peers(593, 532, 2111), target_us=456),
    _case(EP4, 128, 96, _peers(747, 623, 2274), target_share=0.75),
    _case(EP4, 512, 96, _peers(1304, 1136, 2187), target_us=1003),
    _case(EP4, 1024, 96, _peers(2404, 1517), target_us=1517),
    _case(EP4, 4096, 96, _peers(7322, 3890, 3419), target_share=0.65),
    _case(TP4, 1, 6, _peers(36.4, 50.0), target_us=11),
    _case(TP4, 8, 46, _peers(108, 106), target_share=0.75),
    _case(TP4, 32, 158, _peers(302, 291), target_share=0.75),
    _case(TP4, 128, 339, _peers(637, 615), target_share=0.75),
    _fp8_case(rows=512, peers=_peers(1304, 1136, 2187) | {_FP8_PEER: 1040}),
    _fp8_case(rows=1024, peers=_peers(2404, 1517)),
    _fp8_case(rows=4096, peers=_peers(7322, 3890, 3419) | {_FP8_PEER: 1838}),
    _fp8_case(rows=8192, peers={}),
]
