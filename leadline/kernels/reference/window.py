"""Where the window rows of a step are stored, and where each row finds those that it sees."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.kernels.packed import RecordField
from leadline.kernels.reference.kv_store import store_rows


def plan_window(
    pos: Tensor,
    req_of_row: Tensor,
    q_off: Tensor,
    seq_len: Tensor,
    slot: Tensor,
    floor: Tensor,
    *,
    window: int,
    ring: int,
    staging: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Addresses of window rows in a field of rings (cache-and-scheduling 1.8).

    A row at p reads positions ``[max(p - window + 1, floor), p]``. New rows of a group go straight
    to its ring where they overwrite nothing that the step still reads. Those of a longer group are
    staged behind the rings, in the order of the step's rows, until ``commit_window``.

    Args:
        pos: ``[r]`` int64 positions of the rows that read.
        req_of_row: ``[r]`` int64 group of each; -1 for padding, which reads and stores nothing.
        q_off: ``[g + 1]`` int64 first row of each group among the rows that are stored, then their
            number; they are the group's last ones up to ``seq_len``.
        seq_len: ``[g]`` int64, the group's last position of this step plus one.
        slot: ``[g]`` int64.
        floor: ``[g]`` int64, first position of each group that may be read.
        window: W, ``sliding_window``.
        ring: rows of a ring.
        staging: outer unit of the field at which staged rows begin.

    Returns:
        ``[r, W]`` addresses ``outer * ring + inner``, oldest first, -1 behind them; ``[r]``
        ``window_width`` of ``sparse_attention``; ``outer [r]`` and ``inner [r]`` at which a row
        itself is stored, ``outer`` being -1 for padding; and ``[r]`` positions up to each row's
        own, 0 for padding. All int64.
    """
    count = q_off.diff()
    start = seq_len - count
    is_staged = needs_staging(count, window=window, ring=ring)
    group = req_of_row.clamp(min=0)
    is_padding = req_of_row < 0
    lives = ~is_padding.unsqueeze(1)

    oldest = torch.maximum(pos - window + 1, floor[group]).unsqueeze(1)
    position = oldest + torch.arange(window, device=pos.device)
    group = group.unsqueeze(1)

    def address(position: Tensor) -> Tensor:
        in_staging = staging * ring + q_off[group] + position - start[group]
        in_ring = slot[group] * ring + position % ring
        return torch.where(is_staged[group] & (position >= start[group]), in_staging, in_ring)

    own = address(pos.unsqueeze(1))
    index = address(position).masked_fill(~lives | (position > pos.unsqueeze(1)), -1)
    outer = (own // ring).masked_fill(~lives, -1)
    width = seq_len[group.squeeze(1)].clamp(max=window)
    seen = (pos + 1).masked_fill(is_padding, 0)
    return index, width, outer.squeeze(1), (own % ring).squeeze(1), seen


def commit_window(
    rings: RecordField,
    q_off: Tensor,
    seq_len: Tensor,
    slot: Tensor,
    *,
    window: int,
    staging: int,
) -> None:
    """Copy the newest staged rows of every group to its ring, once all of them have been read.

    Args:
        rings: the field of one layer.
        q_off: as ``plan_window`` got it, like all that follows.
        seq_len: likewise.
        slot: likewise.
        window: likewise.
        staging: likewise.
    """
    ring, count = rings.values.shape[1], q_off.diff()
    back = torch.arange(ring, 0, -1, device=q_off.device)
    is_staged = needs_staging(count, window=window, ring=ring).unsqueeze(1)
    group, place = (is_staged & (back <= count.unsqueeze(1))).nonzero(as_tuple=True)
    source = staging * ring + q_off[group + 1] - back[place]
    target = (seq_len[group] - back[place]) % ring
    store_rows(rings, slot[group], target, *rings.gather(source // ring, source % ring))


def needs_staging(count: Tensor, *, window: int, ring: int) -> Tensor:
    """Whether a group of so many rows would overwrite ring rows that its first ones read."""
    return count + window - 1 > ring
