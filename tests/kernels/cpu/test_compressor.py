"""Entries and index keys: the same latents, bytes and rings as the reference leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leadline.cache.pool import make_field
from leadline.kernels import ops
from leadline.kernels.records import Record
from leadline.kernels.registry import REFERENCE, Kernels

WIDTH, KEY, ROTARY, PER_PAGE, RING, EPS = 96, 32, 32, 4, 3, 1e-20


def stored(kernels: Kernels, record: Record, key_record: Record, ratio: int) -> list[Tensor]:
    """Everything that a step of four requests leaves: chunks, a decode row, a replay, padding."""
    torch.manual_seed(3)
    starts, counts = torch.tensor([0, 5, 12, 9]), torch.tensor([11, 1, 3, 6])
    m = int(counts.sum()) + 2
    padding = torch.full((2,), -1)
    pos = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])
    pos = torch.cat((pos, padding.abs()))
    req_of_row = torch.cat((torch.repeat_interleave(torch.arange(4), counts), padding))
    q_off = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    write_from, pages = torch.tensor([0, 0, 0, 12]), 1 + torch.randperm(16).reshape(4, 4)
    angles = ops.rope_angles(pos - ratio + 1, 10000.0 ** -(torch.arange(0, ROTARY, 2) / ROTARY))
    entries, keys = (
        make_field(kind, 17, PER_PAGE, width, "cpu", ROTARY)
        for kind, width in ((record, WIDTH), (key_record, KEY))
    )
    rings = None if ratio == 1 else torch.randn(6, RING, 2 * WIDTH)
    projected = 2 * torch.randn(m, WIDTH if ratio == 1 else 2 * WIDTH)
    with kernels.active():
        latent = ops.store_entries(
            *(projected, torch.rand(WIDTH) + 0.5, *angles, pos, req_of_row, q_off),
            *(torch.tensor([2, 5, 1, 3]), starts + counts, write_from, pages, entries, rings),
            ratio=ratio,
            eps=EPS,
            dtype=torch.float32,
        )
        ops.store_index_keys(
            *(latent, torch.randn(KEY, WIDTH), torch.rand(KEY) + 0.5, *angles),
            *(pos, req_of_row, write_from, pages, keys),
            ratio=ratio,
            eps=EPS,
        )
    fields = (entries.values, entries.scales, keys.values, keys.scales)
    return [tensor for tensor in (latent, rings, *fields) if tensor is not None]


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize(
    ("record", "key_record"),
    [
        (Record.FP4_16, Record.FP4_32),
        (Record.FP8_32, Record.FP4_32),
        (Record.FP8_64, Record.FP4_32),
        (Record.FLOAT32, Record.FLOAT32),
    ],
)
def test_a_step_leaves_what_the_reference_leaves(
    numba_kernels: Kernels, record: Record, key_record: Record, ratio: int
) -> None:
    fast, wanted = (
        stored(kernels, record, key_record, ratio) for kernels in (numba_kernels, REFERENCE)
    )
    for actual, expected in zip(fast, wanted, strict=True):
        if actual.dtype == torch.uint8:  # sums in another order may change a code at a tie
            assert (actual != expected).float().mean() < 0.002
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
