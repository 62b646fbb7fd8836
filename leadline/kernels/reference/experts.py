"""Routed and shared experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.kernels.packed import Weight
from leadline.kernels.reference.accumulate import widen
from leadline.kernels.reference.linear import linear
from leadline.kernels.reference.quant import round_trip_fp8, round_trip_fp8_row


def swiglu(gate_up: Tensor, *, limit: float) -> Tensor:
    """Clamped SwiGLU of ``[.., 2 F]`` (gate first), wide: the gate from above only."""
    gate, up = widen(gate_up).chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def shared_expert(x: Tensor, w13: Weight, w2: Weight, *, limit: float) -> Tensor:
    """One expert for every row, without a weight."""
    hidden = swiglu(linear(x, w13), limit=limit).to(x.dtype)
    return linear(hidden, w2)


def routed_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w13: Weight,
    w2: Weight,
    *,
    limit: float,
    row_scales: bool = False,
    shared: Callable[[], Tensor] | None = None,
) -> Tensor:
    """One GEMM per expert that has rows; everything else runs over all pairs at once."""
    num_rows, per_row = experts.shape
    sorted_experts, by_expert = experts.flatten().sort(stable=True)
    used, rows = sorted_experts.unique_consecutive(return_counts=True)
    counts = dict(zip(used.tolist(), rows.tolist(), strict=True))

    def rounded(x: Tensor, weight: Weight) -> Tensor:
        if not weight.quantizes_input:
            return x
        return round_trip_fp8_row(x) if row_scales else round_trip_fp8(x, weight.input_block)

    x = rounded(x, w13)
    pairs = x[by_expert // per_row]
    hidden = swiglu(_grouped(pairs, w13.dense, counts), limit=limit)
    # The weight counts before the rounding and the quantiser of w2's input (v41-model 5.3).
    hidden = rounded((hidden * weights.flatten()[by_expert].unsqueeze(-1)).to(x.dtype), w2)
    outputs = torch.empty_like(pairs)
    outputs[by_expert] = _grouped(hidden, w2.dense, counts)
    # Where the id is -1 the last expert was multiplied with: that is nobody's output.
    outputs = outputs.view(num_rows, per_row, -1).masked_fill(experts.unsqueeze(-1) < 0, 0)
    total = widen(outputs).sum(1)
    return total if shared is None else (total + shared()).to(x.dtype)


def _grouped(x: Tensor, weight: Tensor, counts: dict[int, int]) -> Tensor:
    """Rows sorted by expert, ``counts`` of each, times the experts' ``[out, in]`` matrices."""
    groups = x.to(weight.dtype).split(list(counts.values()))
    products = [F.linear(rows, weight[e]) for e, rows in zip(counts, groups, strict=True)]
    return torch.cat(products).to(x.dtype)
