"""Hyper-connections: mixing coefficients, collapse and expand of the residual streams."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.kernels.cpu.exponential import exp
from leadline.kernels.cpu.jit import F1, F2, F3, Real, in_float32, inline_sums, kernel
from leadline.kernels.cpu.norm import normalise_row
from leadline.kernels.reference import mhc
from leadline.kernels.reference.quant import store_fp8_32


@inline_sums
def _softmax(x: F1, eps: Real) -> None:
    """In place, with ``eps`` added to every entry."""
    top, total = x[0], np.float32(0)
    for i in range(1, x.shape[0]):
        top = max(top, x[i])
    for i in range(x.shape[0]):
        x[i] = exp(x[i] - top)
        total += x[i]
    for i in range(x.shape[0]):
        x[i] = x[i] / total + eps


@inline_sums
def _sinkhorn(comb: F2, rounds: int, eps: Real) -> None:
    """Column steps, each but the first behind a row step: divide by the sum plus ``eps``."""
    n = comb.shape[0]
    for step in range(rounds):
        if step:
            for i in range(n):
                total = eps
                for o in range(n):
                    total += comb[i, o]
                for o in range(n):
                    comb[i, o] /= total
        for o in range(n):
            total = eps
            for i in range(n):
                total += comb[i, o]
            for i in range(n):
                comb[i, o] /= total


@in_float32(mhc.mhc_coefficients)
def mhc_coefficients(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    sinkhorn_iters: int,
    hc_eps: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The projection is torch's, everything behind it one pass."""
    rows, num_streams, _ = streams.shape
    flat = streams.reshape(rows, -1)
    pre = np.empty((rows, num_streams), np.float32)
    post = np.empty((rows, num_streams), np.float32)
    comb = np.empty((rows, num_streams, num_streams), np.float32)
    mixed = F.linear(flat, fn)
    _coefficients(flat, mixed, base, scale, sinkhorn_iters, hc_eps, eps, pre, post, comb)
    return torch.from_numpy(pre), torch.from_numpy(post), torch.from_numpy(comb)


@kernel
def _coefficients(
    flat: F2,
    mixed: F2,
    base: F1,
    scale: F1,
    rounds: int,
    hc_eps: float,
    eps: float,
    pre: F2,
    post: F2,
    comb: F3,
) -> None:
    rows, width = flat.shape
    n = pre.shape[1]
    one = np.float32(1)
    for r in range(rows):
        total = np.float32(0)
        for i in range(width):
            total += flat[r, i] * flat[r, i]
        rms = one / np.sqrt(total / np.float32(width) + eps)
        gate = mixed[r]
        for s in range(n):
            pre[r, s] = one / (one + exp(-(gate[s] * rms * scale[0] + base[s]))) + hc_eps
            at = n + s
            post[r, s] = np.float32(2) / (one + exp(-(gate[at] * rms * scale[1] + base[at])))
        for i in range(n):
            for o in range(n):
                at = 2 * n + i * n + o
                comb[r, i, o] = gate[at] * rms * scale[2] + base[at]
            _softmax(comb[r, i], hc_eps)
        _sinkhorn(comb[r], rounds, hc_eps)


@inline_sums
def _collapse_row(streams: F2, mix: F1, out: F1) -> None:
    n, width = streams.shape
    for i in range(width):
        out[i] = mix[0] * streams[0, i]
    for s in range(1, n):
        for i in range(width):
            out[i] += mix[s] * streams[s, i]


@in_float32(mhc.mhc_collapse)
def mhc_collapse(streams: Tensor, mix: Tensor) -> Tensor:
    """A weighted sum over streams."""
    out = np.empty((streams.shape[0], streams.shape[2]), np.float32)
    _collapse(streams, mix, out)
    return torch.from_numpy(out)


@kernel
def _collapse(streams: F3, mix: F2, out: F2) -> None:
    for r in range(streams.shape[0]):
        _collapse_row(streams[r], mix[r], out[r])


def mhc_enter(
    streams: Tensor,
    mix: Tensor,
    norm_weight: Tensor,
    *,
    eps: float,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The sum and its norm, row by row."""
    out = np.empty((streams.shape[0], streams.shape[2]), np.float32)
    _enter(streams, mix, norm_weight, eps, out)
    u = torch.from_numpy(out)
    if fp8 is not None:
        store_fp8_32(u, *fp8)
    return u


@kernel
def _enter(streams: F3, mix: F2, weight: F1, eps: float, out: F2) -> None:
    for r in range(streams.shape[0]):
        _collapse_row(streams[r], mix[r], out[r])
        normalise_row(out[r], weight, eps, out[r])


@in_float32(mhc.mhc_expand)
def mhc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Every new stream in one pass over the old ones."""
    out = np.empty(streams.shape, np.float32)
    _expand(y, streams, post, comb, out)
    return torch.from_numpy(out)


@kernel
def _expand(y: F2, streams: F3, post: F2, comb: F3, out: F3) -> None:
    rows, n, width = streams.shape
    for r in range(rows):
        for o in range(n):
            for i in range(width):
                out[r, o, i] = post[r, o] * y[r, i]
            for s in range(n):
                for i in range(width):
                    out[r, o, i] += comb[r, s, o] * streams[r, s, i]
