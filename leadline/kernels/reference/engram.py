"""Engram: n-gram hashes and the gated injection of looked-up rows."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.kernels.reference.accumulate import widen
from leadline.kernels.reference.quant import dequantize_fp8_32


def engram_hash(history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of the n-grams that end at each row (6.3).

    Order n mixes n ids: the XOR of each id times its multiplier, modulo a prime per head. Products
    stay below 2^63, so all of it is exact in int64.

    Args:
        history: ``[m, n]`` int64 classes, the row's own first, then looking back; blocked ones
            hold the class of the pad token.
        multipliers: ``[e, n]`` int64, one row per Engram layer.
        primes: ``[e, columns]`` int64, orders 2 to n, each with its heads.
        offsets: ``[e, columns]`` int64, where a column's part of the layer's table starts.

    Returns:
        ``[m, e, columns]`` int64 rows of each layer's table.
    """
    orders = history.shape[1] - 1
    heads = primes.shape[1] // orders
    products = history.unsqueeze(1) * multipliers  # [m, e, n]
    mixed, columns = products[..., 0], []
    for order in range(1, orders + 1):
        mixed = mixed ^ products[..., order]
        columns.append(mixed.unsqueeze(-1).expand(-1, -1, heads))
    return torch.cat(columns, dim=-1) % primes + offsets


def gather_rows(codes: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """Rows of a packed table, dequantised (6.4); exact.

    Args:
        codes: ``[table rows, n]`` E4M3 as uint8.
        scales: ``[table rows, n / 32]`` UE8M0.
        rows: int64 of any shape; -1 is a row of zeros.

    Returns:
        ``[*rows.shape, n]`` bf16, on the device of ``rows``.
    """
    index = rows.clamp(min=0).to(codes.device)
    values = dequantize_fp8_32(codes[index], scales[index]).to(rows.device)
    return values.masked_fill(rows.unsqueeze(-1) < 0, 0).to(torch.bfloat16)


def engram_inject(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, live: Tensor, *, eps: float
) -> Tensor:
    """Statistics per stream; the gate of a row that is not live is 0, nothing else closes it."""
    num_streams, width = streams.shape[1:]
    hidden = widen(streams)
    key, value = widen(kv).split((num_streams * width, width), dim=-1)
    key = key.unflatten(-1, (num_streams, width))
    dot = (hidden * (widen(q_weight) * widen(k_weight)) * key).sum(-1)
    dot = dot * torch.rsqrt(hidden.square().mean(-1) + eps)
    dot = dot * torch.rsqrt(key.square().mean(-1) + eps) * width**-0.5
    gate = torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot).sigmoid()
    gate = gate * live.unsqueeze(-1)
    return (hidden + gate.unsqueeze(-1) * value.unsqueeze(1)).to(streams.dtype)
