"""Rows of random documents."""

from __future__ import annotations

import torch

from leadline.tools.train_tiny.batch import Batch


def packed_rows(rows: int, length: int) -> Batch:
    """Documents of 16 to 600 tokens, at even places."""
    generator = torch.Generator().manual_seed(0)
    first = torch.zeros(rows, length, dtype=torch.long)
    for row in first:
        at = 0
        while at < length:
            row[at:] = at
            at += 2 * int(torch.randint(8, 300, (), generator=generator))
    ids = torch.randint(64, 4000, (rows, length), generator=generator)
    return Batch(ids, first, torch.ones(rows, length))
