"""The softmax over window rows, entries and the sink: in plain torch, and by flex attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from leadline.tools.train_tiny.rows import Rows

# Both return the output [B, S, H, d] and the log of the softmax's denominator [B, S, H], sink
# included. Queries are [B, S, H, d] rotated, latents [B, S, d] the window's, entries [B, N, d].


def attend(
    q: Tensor,
    latents: Tensor,
    entries: Tensor | None,
    ratio: int,
    chosen: Tensor | None,
    sink: Tensor,
    rows: Rows,
) -> tuple[Tensor, Tensor]:
    """The definition (v41-model 3.7), every score in memory."""
    keys, mask = latents, rows.window_mask()
    if entries is not None:
        seen = rows.entry_mask(ratio)
        keys = torch.cat((keys, entries), dim=1)
        mask = torch.cat((mask, seen if chosen is None else seen & chosen), dim=2)
    b, s, heads, d = q.shape
    scores = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).view(b, s, heads, -1).float()
    scores = (scores * d**-0.5).masked_fill(~mask.unsqueeze(2), -torch.inf)
    total = torch.logaddexp(scores.logsumexp(-1), sink)
    weights = (scores - total.unsqueeze(-1)).exp().to(q.dtype)
    return torch.bmm(weights.flatten(1, 2), keys).view_as(q), total


def attend_flex(
    q: Tensor,
    latents: Tensor,
    entries: Tensor | None,
    ratio: int,
    chosen: Tensor | None,
    sink: Tensor,
    rows: Rows,
) -> tuple[Tensor, Tensor]:
    """The same in one kernel that skips blocks of keys which no query of a block sees.

    The sink enters afterwards: it scales a row by the share of the denominator that is not its own.
    """
    keys = latents if entries is None else torch.cat((latents, entries), dim=1)
    keys = keys.unsqueeze(1)
    out, total = _flex()(
        q.transpose(1, 2),
        keys,
        keys,
        block_mask=_block_mask(rows, ratio if entries is not None else 0, chosen, keys.shape[2]),
        enable_gqa=True,
        return_lse=True,
    )
    total = total.transpose(1, 2)
    share = (total - sink).sigmoid()
    return out.transpose(1, 2) * share.unsqueeze(-1).to(out.dtype), torch.logaddexp(total, sink)


@functools.cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _block_mask(rows: Rows, ratio: int, chosen: Tensor | None, num_keys: int) -> Any:
    """Which keys each query sees; ``ratio`` 0 is the window alone."""
    from torch.nn.attention.flex_attention import BlockMask

    first, window, length = rows.batch.first, rows.window, rows.batch.ids.shape[1]

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        start = first[b, q]
        near = (k <= q) & (q - k < window) & (k >= start)
        if not ratio:
            return near
        entry = (k - length).clamp(min=0)
        opening = entry * ratio
        seen = (opening + ratio - 1 <= q) & (opening >= start)
        if chosen is not None:
            seen = seen & chosen[b, q, entry]
        return torch.where(k < length, near, seen)

    if ratio not in rows.key_blocks:
        rows.key_blocks[ratio] = _key_blocks(rows, ratio)
    counts, indices = rows.key_blocks[ratio]
    return BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(length, num_keys)
    )


_BLOCK = 128


def _key_blocks(rows: Rows, ratio: int) -> tuple[Tensor, Tensor]:
    """Counts ``[B, 1, Q]`` and indices ``[B, 1, Q, K]`` of the key blocks of each query block.

    Documents are contiguous, so what a block of queries sees is a run of window rows and a run of
    entries.
    """
    first, length = rows.batch.first, rows.batch.ids.shape[1]
    low = torch.arange(0, length, _BLOCK, device=first.device)
    high = low + _BLOCK - 1
    start = first[:, low]
    block = torch.arange(length // _BLOCK, device=first.device)
    from_block = torch.maximum(start, low - rows.window + 1) // _BLOCK
    used = (block >= from_block.unsqueeze(2)) & (block <= (high // _BLOCK).unsqueeze(1))
    if ratio:
        block = torch.arange(-(-length // ratio // _BLOCK), device=first.device)
        newest = (high + 1) // ratio - 1
        oldest_block = (start // ratio // _BLOCK).unsqueeze(2)
        seen = (block >= oldest_block) & (block <= (newest // _BLOCK).unsqueeze(1))
        used = torch.cat((used, seen), dim=2)
    used = used.int().unsqueeze(1)
    indices = used.argsort(dim=-1, descending=True, stable=True)
    return used.sum(-1, dtype=torch.int32), indices.int()
