"""Engram: the gated injection of looked-up rows."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from leadline.kernels.cpu.jit import F2, F3, Flags1, in_float32, kernel
from leadline.kernels.reference import engram


@in_float32(engram.engram_inject)
def engram_inject(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, live: Tensor, *, eps: float
) -> Tensor:
    """One pass for the three sums of a stream, one for what is added."""
    out = np.empty(streams.shape, np.float32)
    _inject(streams, kv, q_weight * k_weight, live, eps, out)
    return torch.from_numpy(out)


@kernel
def _inject(streams: F3, kv: F2, weight: F2, live: Flags1, eps: float, out: F3) -> None:
    rows, n, width = streams.shape
    one, mean = np.float32(1), np.float32(1 / width)
    for r in range(rows):
        for s in range(n):
            dot, hidden, key = np.float32(0), np.float32(0), np.float32(0)
            at = s * width
            for i in range(width):
                x, y = streams[r, s, i], kv[r, at + i]
                dot += x * weight[s, i] * y
                hidden += x * x
                key += y * y
            dot /= math.sqrt(hidden * mean + eps) * math.sqrt(key * mean + eps)
            dot *= np.float32(width**-0.5)
            root = math.copysign(math.sqrt(max(abs(dot), np.float32(1e-6))), dot)
            gate = one / (one + math.exp(-root)) if live[r] else np.float32(0)
            for i in range(width):
                out[r, s, i] = streams[r, s, i] + gate * kv[r, n * width + i]
