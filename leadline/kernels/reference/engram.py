"""Engram: n-gram hashes and the gated injection of looked-up rows."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.kernels.reference.accumulate import widen
from leadline.kernels.reference.quant import dequantize_fp8_32

DEAD = -1
"""Class of what takes no part in n-grams: images, what lies before a request, unknown ids."""


def engram_history(
    ids: Tensor,
    hist: Tensor,
    req_of_row: Tensor,
    q_off: Tensor,
    token_map: Tensor,
    *,
    pad: int,
    image_token_id: int,
) -> tuple[Tensor, Tensor]:
    """What ``engram_hash`` mixes: classes of each row's id and of those before it (6.3).

    Looking back ends at the first id that is dead, and never leaves the request: before a group's
    first row it reads ``hist``.

    Args:
        ids: ``[m]`` int32.
        hist: ``[g, n - 1]`` int32, ids before each group's first row, oldest first; -1 is none.
        req_of_row: ``[m]`` int64, group of each row; -1 for padding.
        q_off: ``[g + 1]`` int64, first row of each group.
        token_map: ``[V]`` int64, class of each id; -1 where it has none.
        pad: class that stands for what is dead.
        image_token_id: an id without a class.

    Returns:
        ``[m, n]`` int64 classes, the row's own first; ``[m]`` bool, no image and no padding.
    """
    m, width = len(ids), hist.shape[1]
    every = torch.cat((ids, hist.flatten()))
    dead = (every < 0) | (every == image_token_id)
    classes = token_map[every.long().clamp(min=0)].masked_fill(dead, DEAD)
    group = req_of_row.clamp(min=0)
    source = torch.arange(m, device=ids.device).unsqueeze(1)
    source = source - torch.arange(width + 1, device=ids.device)
    before = source - q_off[group].unsqueeze(1)  # below 0: in the history
    in_history = m + group.unsqueeze(1) * width + width + before
    history = classes[torch.where(before >= 0, source, in_history)]
    blocked = (history == DEAD).cummax(1).values  # from the first dead one on
    return history.masked_fill(blocked, pad), (history[:, 0] != DEAD) & (req_of_row >= 0)


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
