"""Hyper-connections: mixing coefficients, collapse and expand of the residual streams."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.kernels.reference.accumulate import widen


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
    """Project first, scale by the rms factor afterwards; Sinkhorn ends with a column step."""
    num_streams = streams.shape[1]
    mixed = _project(streams, fn, eps)
    sizes = (num_streams, num_streams, num_streams * num_streams)
    scales = torch.cat([part.expand(size) for part, size in zip(scale, sizes, strict=True)])
    gates = torch.addcmul(base, mixed, scales)
    pre, post, comb = gates.split(sizes, dim=-1)
    comb = comb.unflatten(-1, (num_streams, num_streams)).softmax(-1) + hc_eps
    comb = _sinkhorn(comb, sinkhorn_iters, hc_eps)
    return pre.sigmoid() + hc_eps, 2 * post.sigmoid(), comb


def mhc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, hc_eps: float, eps: float
) -> Tensor:
    """What ``pre`` of a site would be; nothing makes the weights add up to 1."""
    return torch.addcmul(base, _project(streams, fn, eps), scale).sigmoid() + hc_eps


def _project(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """All channels of all streams times ``fn``, then the rms factor."""
    flat = widen(streams).flatten(1)
    return F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def _sinkhorn(comb: Tensor, rounds: int, eps: float) -> Tensor:
    """Row steps ``comb / (row sums + eps)`` and column steps in turn, the first row step left out.

    All that they do is to scale rows and columns. Carrying the inverses of these factors, a row
    step is ``rows <- comb @ (1 / columns) + eps * rows``: two operations instead of three.
    """
    rows = torch.ones_like(comb[:, :, :1])
    columns = comb.sum(1).unsqueeze(2) + eps
    for _ in range(rounds - 1):
        rows.baddbmm_(comb, columns.reciprocal(), beta=eps)
        columns.baddbmm_(comb.mT, rows.reciprocal(), beta=eps)
    return comb / rows / columns.mT


def mhc_collapse(streams: Tensor, mix: Tensor) -> Tensor:
    """A weighted sum over streams, rounded once."""
    return (mix.unsqueeze(1) @ widen(streams)).squeeze(1).to(streams.dtype)


def mhc_mean(streams: Tensor) -> Tensor:
    """The mean over streams, rounded once."""
    return widen(streams).mean(1).to(streams.dtype)


def mhc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """``comb[:, i, o]``: the first index is the incoming stream."""
    added = post.unsqueeze(-1) * widen(y).unsqueeze(1)
    return torch.baddbmm(added, comb.transpose(1, 2), widen(streams)).to(streams.dtype)
