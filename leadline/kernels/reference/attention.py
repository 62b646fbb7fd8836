"""Sparse attention over the window and the selected entries, with a sink."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.kernels.packed import RecordField
from leadline.kernels.reference.accumulate import widen
from leadline.kernels.reference.blocks import host_may_wait, rows_per_block
from leadline.kernels.reference.indexer import entry_address
from leadline.kernels.reference.kv_store import load_rows
from leadline.kernels.reference.quant import store_fp8_32
from leadline.kernels.reference.rope import rotate

_SOFTMAX_BLOCK = 64


def sparse_attention(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: RecordField,
    window_index: Tensor,
    window_width: Tensor,
    kv: RecordField | None,
    page_table: Tensor,
    req_of_row: Tensor,
    selected: Tensor | None,
    sink: Tensor,
    *,
    exact_rounding: bool,
    visible: Tensor | None = None,
    lse: Tensor | None = None,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Row blocks bound the gathered keys; rows are independent of each other."""
    if kv is None:
        entries = window_index[:, :0]
    elif visible is None:
        assert selected is not None, "with kv, either selected or visible"
        entries = selected
    else:  # no copies: a row of places, seen by all
        span = torch.arange(page_table.shape[1] * kv.values.shape[1], device=q.device)
        entries = span.expand(len(q), -1)
    slots = window_index.shape[1] + entries.shape[1]
    step = rows_per_block(slots * q.shape[2], q.device)
    core = _blocked_softmax if exact_rounding and q.dtype == torch.bfloat16 else _plain_softmax
    window_keys = _window_loader(window, window_index.clamp(min=0), q.dtype)
    outputs = []
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        keys, valid = window_keys(rows), window_index[rows] >= 0
        if kv is not None:
            chosen = entries[rows]
            if visible is not None:
                chosen = chosen.masked_fill(chosen >= visible[rows].unsqueeze(1), -1)
            address = entry_address(
                chosen.clamp(min=0), page_table[req_of_row[rows]], kv.values.shape[1]
            )
            keys = torch.cat((keys, load_rows(kv, *address, q.dtype)), dim=1)
            valid = torch.cat((valid, chosen >= 0), dim=1)
            if core is _blocked_softmax:
                keys, valid = _close_gap(keys, valid, window_width[rows], window_index.shape[1])
        # Places without a key were read from somewhere: what lies there may be anything, and a
        # weight of 0 does not hide a NaN.
        keys.masked_fill_(~valid.unsqueeze(2), 0)
        turned = rotate(q[rows], cos[rows], sin[rows])
        scores = widen(turned) @ widen(keys).transpose(1, 2) * q.shape[2] ** -0.5
        scores = torch.where(valid.unsqueeze(1), scores, -torch.inf)
        sums, total, highest = core(scores, widen(keys))
        if lse is not None:
            lse[rows] = (highest + total.log()).squeeze(2)
        attended = _divide(sums, total + (sink.unsqueeze(-1) - highest).exp()).to(q.dtype)
        outputs.append(rotate(attended, cos[rows], sin[rows], inverse=True))
    output = torch.cat(outputs)
    if fp8 is not None:
        store_fp8_32(output, *fp8)
    return output


def _window_loader(
    window: RecordField, index: Tensor, dtype: torch.dtype
) -> Callable[[slice], Tensor]:
    """What loads the window of some rows, ``[n, W, d]``."""
    ring = window.values.shape[1]
    if not host_may_wait(index.device):
        return lambda rows: load_rows(window, index[rows] // ring, index[rows] % ring, dtype)
    # They belong to many queries, so those that any of them sees are unpacked before.
    seen, place = index.unique(return_inverse=True)
    unpacked = load_rows(window, seen // ring, seen % ring, dtype)
    return lambda rows: F.embedding(place[rows], unpacked)


def _plain_softmax(scores: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sums of keys, sums of weights, and the scores whose weight is 1."""
    highest = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = (scores - highest).exp()
    return weights @ keys, weights.sum(-1, keepdim=True), highest


def _blocked_softmax(scores: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same online in blocks of 64 slots; weights of sums are bf16 (v41-model 3.7)."""
    highest = torch.full_like(scores[..., :1], -1e30)
    total = torch.zeros_like(highest)
    output = torch.zeros_like(scores[..., :1] * keys[:, :1])
    for block, key in zip(
        scores.split(_SOFTMAX_BLOCK, -1), keys.split(_SOFTMAX_BLOCK, 1), strict=True
    ):
        raised = torch.maximum(highest, block.amax(-1, keepdim=True))
        weights = (block - raised).exp()
        shrink = (highest - raised).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        output = output * shrink + weights.bfloat16().float() @ key
        highest = raised
    return output, total, highest


def _divide(output: Tensor, total: Tensor) -> Tensor:
    """Without a key and with a sink of -inf there is nothing to divide, nor a denominator."""
    return output / total.masked_fill(total == 0, 1)


def _close_gap(keys: Tensor, valid: Tensor, width: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Let the selected entries start right behind ``width`` window slots: it fixes the borders of
    the 64-slot blocks, hence which maximum a probability is rounded against.
    """
    place = torch.arange(keys.shape[1], device=keys.device).expand(keys.shape[0], -1)
    gap = (window - width).unsqueeze(1)
    source = torch.where(place < width.unsqueeze(1), place, place + gap)
    inside = source < keys.shape[1]
    source = source.clamp(max=keys.shape[1] - 1)
    return keys.gather(1, source.unsqueeze(-1).expand(-1, -1, keys.shape[2])), (
        valid.gather(1, source) & inside
    )
