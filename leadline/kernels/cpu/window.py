"""Addresses of window rows, in one pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leadline.kernels.cpu.jit import I1, I2, kernel


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row by row."""
    index = np.empty((len(pos), window), np.int64)
    own = np.empty((3, len(pos)), np.int64)
    _plan(pos, req_of_row, q_off, seq_len, slot, floor, ring, staging, index, own)
    width, outer, inner = torch.from_numpy(own)
    return torch.from_numpy(index), width, outer, inner


@kernel
def _plan(
    pos: I1,
    req_of_row: I1,
    q_off: I1,
    seq_len: I1,
    slot: I1,
    floor: I1,
    ring: int,
    staging: int,
    index: I2,
    own: I2,
) -> None:
    window = index.shape[1]
    for r in range(index.shape[0]):
        index[r] = -1
        own[0, r], own[1, r], own[2, r] = 0, -1, 0
        g = req_of_row[r]
        if g < 0:
            continue
        own[0, r] = min(seq_len[g], window)
        start = seq_len[g] - (q_off[g + 1] - q_off[g])
        stays = seq_len[g] - start + window - 1 <= ring
        for position in range(max(pos[r] - window + 1, floor[g]), pos[r] + 1):
            address = slot[g] * ring + position % ring
            if position >= start and not stays:
                address = staging * ring + q_off[g] + position - start
            index[r, position - max(pos[r] - window + 1, floor[g])] = address
        if stays:
            own[1, r], own[2, r] = slot[g], pos[r] % ring
        else:
            address = q_off[g] + pos[r] - start
            own[1, r], own[2, r] = staging + address // ring, address % ring
