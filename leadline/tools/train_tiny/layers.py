"""What a block is made of, each as a pure function of activations and weights.

Pure functions of rows ``[T, ...]``: one compiled form serves every layer, whatever the lengths of
sequences. Activations are float32, or bf16 with the roundings of v41-model 4.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.tools.train_tiny.quantize import fake_fp8_32

P = ParamSpec("P")
R = TypeVar("R")


class Weight(nn.Module):
    """A parameter called ``weight``, so that names become those of the official tensors."""

    weight: nn.Parameter

    def __init__(self, *shape: int, std: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * std)
        self.weight.data = self.weight.data.to(dtype)


def matrix(out: int, inp: int, dtype: torch.dtype, *, gain: float = 0.7) -> Weight:
    """``[out, in]``; unit inputs come out with a standard deviation of ``gain``."""
    return Weight(out, inp, std=gain * inp**-0.5, dtype=dtype)


def norm_weight(size: int, dtype: torch.dtype) -> Weight:
    """Ones ``[size]``."""
    weight = Weight(size, std=0.0, dtype=dtype)
    nn.init.ones_(weight.weight)
    return weight


class Compiler:
    """``torch.compile`` for the functions of a model, or nothing at all."""

    def __init__(self, fused: bool) -> None:
        self.fused = fused
        self._compiled: dict[Any, Any] = {}
        if fused:  # a form for each shape, phase and kind of layer
            torch._dynamo.config.recompile_limit = 64

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if not self.fused:
            return function
        if function not in self._compiled:
            self._compiled[function] = torch.compile(function, dynamic=False)
        compiled: Callable[P, R] = self._compiled[function]
        return compiled


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Statistics and weight in float32, one rounding (2.2)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(
        x.dtype
    )


def packed_linear(x: Tensor, weight: Tensor, quantize: bool) -> Tensor:
    """``x W^T`` of a weight that files hold packed: its input is MXFP8 (7.3)."""
    return F.linear(fake_fp8_32(x) if quantize else x, weight)


def collapse(streams: Tensor, mix: Tensor) -> Tensor:
    """``[T, S, D]``, ``[T, S]`` -> ``[T, D]`` (2.3)."""
    return (streams.float() * mix.unsqueeze(-1)).sum(1).to(streams.dtype)


def enter_site(
    streams: Tensor,
    carried: Tensor,
    norm: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    hc_eps: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a sublayer reads, and the coefficients that its site makes of the same streams (2.1).

    Args:
        streams: ``[T, S, D]``.
        carried: ``[T, S]`` float32, the pre coefficients of the site before.
        norm: ``[D]`` weight in front of the sublayer.
        fn: ``[S (S + 2), S D]`` float32.
        base: ``[S (S + 2)]`` float32.
        scale: ``[3]`` float32.
        hc_eps: added to the pre coefficients.
        eps: of both root mean squares.

    Returns:
        The sublayer's input ``[T, D]``, pre ``[T, S]`` for the next site, post ``[T, S]`` and the
        logits of the mixing matrix ``[T, S, S]``.
    """
    s = streams.shape[1]
    flat = streams.flatten(1).float()
    mixed = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    pre = mixed[:, :s] * scale[0] + base[:s]
    post = mixed[:, s : 2 * s] * scale[1] + base[s : 2 * s]
    comb = mixed[:, 2 * s :] * scale[2] + base[2 * s :]
    u = rms_norm(collapse(streams, carried), norm, eps)
    return u, pre.sigmoid() + hc_eps, 2 * post.sigmoid(), comb.unflatten(1, (s, s))


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams from a sublayer's output ``[T, D]`` (2.3)."""
    wide = streams.float()
    added = post.unsqueeze(-1) * y.float().unsqueeze(1)
    # Sixteen products, written as a sum so that they stay in registers.
    for i in range(streams.shape[1]):
        added = added + comb[:, i].unsqueeze(-1) * wide[:, i].unsqueeze(1)
    return added.to(streams.dtype)


def route(x: Tensor, gate: Tensor, bias: Tensor, top_k: int, scale: float) -> Tensor:
    """Weights of all experts ``[T, E]`` float32, 0 for those not picked (5.1)."""
    scores = F.softplus(F.linear(x.float(), gate.float())).sqrt()
    biased = (scores + bias).detach()
    experts = torch.arange(biased.shape[1], device=x.device)
    picked = torch.zeros_like(biased, dtype=torch.bool)
    for _ in range(top_k):
        best = biased.masked_fill(picked, -torch.inf).argmax(-1, keepdim=True)
        picked = picked | (experts == best)
    weights = scores * picked
    if top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Clamped, float32 (5.3)."""
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


def moe(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    shared_w1: Tensor,
    shared_w3: Tensor,
    shared_w2: Tensor,
    top_k: int,
    scale: float,
    limit: float,
    quantize: bool,
) -> tuple[Tensor, Tensor]:
    """All experts on all rows, those not picked with weight 0: static shapes, no scatter (5).

    Args:
        x: ``[T, D]``.
        gate: ``[E, D]``.
        bias: ``[E]`` float32, for picking only.
        w1: ``[E, F, D]``.
        w3: ``[E, F, D]``.
        w2: ``[E, D, F]``.
        shared_w1: ``[F, D]``.
        shared_w3: ``[F, D]``.
        shared_w2: ``[D, F]``.
        top_k: ``num_experts_per_tok``.
        scale: ``routed_scaling_factor``.
        limit: ``swiglu_limit``.
        quantize: activations in front of packed weights.

    Returns:
        ``[T, D]``, and how many tokens picked each expert, ``[E]`` float32.
    """
    weights = route(x, gate, bias, top_k, scale)
    x = fake_fp8_32(x) if quantize else x
    gates = F.linear(x, w1.flatten(0, 1)).unflatten(1, w1.shape[:2])
    up = F.linear(x, w3.flatten(0, 1)).unflatten(1, w3.shape[:2])
    hidden = (swiglu(gates, up, limit) * weights.unsqueeze(-1)).to(x.dtype)
    routed = packed_linear(hidden.flatten(1), w2.transpose(0, 1).flatten(1), quantize)
    one = swiglu(F.linear(x, shared_w1), F.linear(x, shared_w3), limit).to(x.dtype)
    picks = (weights.detach() > 0).sum(0, dtype=torch.float32)
    return routed + packed_linear(one, shared_w2, quantize), picks


def engram_inject(
    streams: Tensor,
    rows: Tensor,
    wkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    quantize: bool,
) -> Tensor:
    """Add the gated values of looked-up rows ``[T, columns * width]`` to every stream (6.4)."""
    s, d = streams.shape[1:]
    kv = packed_linear(rows, wkv, quantize).float()
    key, value = kv[:, : s * d].unflatten(1, (s, d)), kv[:, s * d :]
    wide = streams.float()
    dot = (wide * (q_weight.float() * k_weight.float()) * key).sum(-1)
    dot = dot * torch.rsqrt(wide.square().mean(-1) + eps)
    dot = dot * torch.rsqrt(key.square().mean(-1) + eps) * d**-0.5
    gate = torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot).sigmoid()
    return torch.addcmul(wide, gate.unsqueeze(-1), value.unsqueeze(1)).to(streams.dtype)


def weighted_cross_entropy(
    hidden: Tensor, norm: Tensor, head: Tensor, targets: Tensor, weights: Tensor, eps: float
) -> Tensor:
    """Weighted loss of each row ``[T]`` float32; hidden ``[T, D]`` is not normed yet."""
    logits = F.linear(rms_norm(hidden, norm, eps).float(), head.float())
    return F.cross_entropy(logits, targets, reduction="none") * weights
