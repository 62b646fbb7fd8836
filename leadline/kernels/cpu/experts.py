"""Routed and shared experts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.kernels.cpu.exponential import exp
from leadline.kernels.cpu.formats import clamp, round_trip_fp8
from leadline.kernels.cpu.jit import F1, F2, F3, I2, Real, Whole, in_float32, inline_sums, kernel
from leadline.kernels.cpu.linear import linear
from leadline.kernels.cpu.quant import round_rows_fp8
from leadline.kernels.packed import Weight
from leadline.kernels.reference import experts


@inline_sums
def _swiglu_row(
    gate_up: F1,
    weight: Real,
    limit: Real,
    block: Whole,
    out: F1,
) -> None:
    """Clamped SwiGLU times ``weight``, rounded to E4M3 by blocks of so many channels if any."""
    width, one = out.shape[0], np.float32(1)
    for i in range(width):
        gate = gate_up[i]
        gate = limit if gate > limit else gate
        silu = gate / (one + exp(-gate))
        out[i] = silu * clamp(gate_up[width + i], limit) * weight
    if block:
        round_trip_fp8(out, block, out)


_BLOCK = 4


@inline_sums
def _product(x: F2, weight: F2, count: Whole, out: F2) -> None:
    """``x W^T`` of the first rows; of others too, where all together take no longer."""
    width = x.shape[1]
    for o in range(weight.shape[0]):
        if count > 1:
            a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(width):
                a += x[0, i] * weight[o, i]
                b += x[1, i] * weight[o, i]
                c += x[2, i] * weight[o, i]
                d += x[3, i] * weight[o, i]
            out[0, o], out[1, o], out[2, o], out[3, o] = a, b, c, d
        else:
            total = np.float32(0)
            for i in range(width):
                total += x[0, i] * weight[o, i]
            out[0, o] = total


@in_float32(experts.shared_expert)
def shared_expert(x: Tensor, w13: Weight, w2: Weight, *, limit: float) -> Tensor:
    """Products by torch, SwiGLU and the rounding behind it in one pass."""
    gate_up = linear(x, w13)
    hidden = np.empty((x.shape[0], gate_up.shape[1] // 2), np.float32)
    _swiglu(gate_up, limit, w2.input_block if w2.quantizes_input else 0, hidden)
    return F.linear(torch.from_numpy(hidden), w2.dense)


@kernel
def _swiglu(gate_up: F2, limit: float, block: int, out: F2) -> None:
    for r in range(out.shape[0]):
        _swiglu_row(gate_up[r], np.float32(1), limit, block, out[r])


@in_float32(experts.routed_experts)
def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Weight,
    w2: Weight,
    *,
    limit: float,
    row_scales: bool = False,
    shared: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Expert by expert, so that one expert's weights are read once for all of its rows."""
    if w13.quantizes_input:
        x = round_rows_fp8(x, x.shape[1] if row_scales else w13.input_block)
    block = w2.shape[2] if row_scales else w2.input_block
    block = block if w2.quantizes_input else 0
    out = np.zeros(x.shape, np.float32)
    _routed_experts(x, ids, weights, w13.dense, w2.dense, limit, block, out)
    total = torch.from_numpy(out)
    return total if shared is None else total + shared()


@kernel
def _routed_experts(
    x: F2, ids: I2, weights: F2, w13: F3, w2: F3, limit: float, block: int, out: F2
) -> None:
    num_rows, per_row = ids.shape
    num_experts, twice, width = w13.shape
    inputs, gate_up = np.zeros((_BLOCK, width), np.float32), np.empty((_BLOCK, twice), np.float32)
    hidden = np.zeros((_BLOCK, twice // 2), np.float32)
    outputs = np.empty((_BLOCK, width), np.float32)
    row_of, weight_of = np.empty(_BLOCK, np.int64), np.empty(_BLOCK, np.float32)
    # Pairs by expert: counted, summed up, and put in their places.
    by_expert = np.empty(num_rows * per_row, np.int64)
    first, place = np.zeros(num_experts + 1, np.int64), np.zeros(num_experts, np.int64)
    for r in range(num_rows):
        for j in range(per_row):
            if ids[r, j] >= 0:
                first[ids[r, j] + 1] += 1
    for e in range(num_experts):
        place[e] = first[e]
        first[e + 1] += first[e]
    for pair in range(num_rows * per_row):
        e = ids[pair // per_row, pair % per_row]
        if e >= 0:
            by_expert[place[e]] = pair
            place[e] += 1
    for e in range(num_experts):
        for start in range(first[e], first[e + 1], _BLOCK):
            count = min(_BLOCK, first[e + 1] - start)
            for b in range(count):
                pair = by_expert[start + b]
                row_of[b] = pair // per_row
                weight_of[b] = weights[row_of[b], pair % per_row]
                for i in range(width):
                    inputs[b, i] = x[row_of[b], i]
            _product(inputs, w13[e], count, gate_up)
            for b in range(count):
                # The weight counts before the rounding (v41-model 5.3).
                _swiglu_row(gate_up[b], weight_of[b], limit, block, hidden[b])
            _product(hidden, w2[e], count, outputs)
            for b in range(count):
                for i in range(width):
                    out[row_of[b], i] += outputs[b, i]
