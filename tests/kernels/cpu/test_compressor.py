"""Entries and index keys: the same latents, bytes and rings as the reference leaves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from leadline.cache.pool import make_field
from leadline.kernels import ops
from leadline.kernels.records import Record
from leadline.kernels.registry import REFERENCE, Kernels

WIDTH, KEY, ROTARY, PER_PAGE, RING, EPS = 96, 32, 32, 4, 3, 1e-20


@dataclass(frozen=True)
class Step:
    """A step of four requests: chunks, a decode row, a replay, and padding."""

    pos: Tensor
    req_of_row: Tensor
    q_off: Tensor
    slot: Tensor
    seq_len: Tensor
    write_from: Tensor
    pages: Tensor

    @property
    def place(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What ``store_entries`` is told of it behind ``rows``."""
        return self.q_off, self.slot, self.seq_len, self.write_from, self.pages

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        return self.pos, self.req_of_row

    def angles(self, ratio: int) -> tuple[Tensor, Tensor]:
        frequencies = 10000.0 ** -(torch.arange(0, ROTARY, 2) / ROTARY)
        return ops.rope_angles(self.pos - ratio + 1, frequencies)


def make_step() -> Step:
    starts, counts = torch.tensor([0, 5, 12, 9]), torch.tensor([11, 1, 3, 6])
    padding = torch.full((2,), -1)
    pos = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])
    pos = torch.cat((pos, padding.abs()))
    req_of_row = torch.cat((torch.repeat_interleave(torch.arange(4), counts), padding))
    q_off = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    write_from, pages = torch.tensor([0, 0, 0, 12]), 1 + torch.randperm(16).reshape(4, 4)
    slot = torch.tensor([2, 5, 1, 3])
    return Step(pos, req_of_row, q_off, slot, starts + counts, write_from, pages)


def stored(kernels: Kernels, record: Record, key_record: Record, ratio: int) -> list[Tensor]:
    """Everything that a step leaves."""
    torch.manual_seed(3)
    step = make_step()
    m, angles = len(step.pos), step.angles(ratio)
    entries, keys = (
        make_field(kind, 17, PER_PAGE, width, "cpu", ROTARY)
        for kind, width in ((record, WIDTH), (key_record, KEY))
    )
    rings = None if ratio == 1 else torch.randn(6, RING, 2 * WIDTH)
    projected = 2 * torch.randn(m, WIDTH if ratio == 1 else 2 * WIDTH)
    with kernels.active():
        latent = ops.store_entries(
            *(projected, torch.rand(WIDTH) + 0.5, *angles, *step.rows, *step.place),
            entries,
            rings,
            ratio=ratio,
            eps=EPS,
            dtype=torch.float32,
        )
        ops.store_index_keys(
            *(latent, torch.randn(KEY, WIDTH), torch.rand(KEY) + 0.5, *angles),
            *(*step.rows, step.write_from, step.pages, keys),
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
        (Record.BFLOAT16, Record.BFLOAT16),
        (Record.FLOAT32, Record.FLOAT32),
    ],
)
def test_a_step_leaves_what_the_reference_leaves(
    numba_kernels: Kernels, record: Record, key_record: Record, ratio: int
) -> None:
    fast, wanted = (
        stored(kernels, record, key_record, ratio) for kernels in (numba_kernels, REFERENCE)
    )
    assert_alike(fast, wanted)


def assert_alike(fast: list[Tensor], wanted: list[Tensor]) -> None:
    for actual, expected in zip(fast, wanted, strict=True):
        if actual.dtype == torch.uint8:  # sums in another order may change a code at a tie
            assert (actual != expected).float().mean() < 0.002
        else:
            tolerance = 1e-5 if actual.dtype == torch.float32 else 2**-7
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def pooled(kernels: Kernels, record: Record, ratio: int, overlaps: bool) -> list[Tensor]:
    """Everything that a step of V4 leaves: of index keys, where they are packed so."""
    torch.manual_seed(4)
    step, halves = make_step(), 2 if overlaps else 1
    width = KEY if record is Record.FP4_32 else WIDTH
    field = make_field(record, 17, PER_PAGE, width, "cpu", ROTARY)
    rings = torch.randn(6, halves * ratio - 1, 2 * halves * width)
    wide = 2 * torch.randn(len(step.pos), 3 * halves * width)  # some of it is another pool's
    with kernels.active():
        latent = ops.store_entries(
            wide[:, halves * width :],
            torch.rand(width) + 0.5,
            *(*step.angles(ratio), *step.rows, *step.place, field, rings),
            ratio=ratio,
            eps=EPS,
            dtype=torch.float32,
            ape=torch.randn(ratio, halves * width),
            overlaps=overlaps,
            hadamard=record is Record.FP4_32,
        )
    fields = (field.values, field.scales)
    return [tensor for tensor in (latent, rings, *fields) if tensor is not None]


@pytest.mark.parametrize(("ratio", "overlaps"), [(4, True), (8, False)], ids=["c4a", "c8a"])
@pytest.mark.parametrize("record", [Record.FP8_64, Record.FP4_32, Record.BFLOAT16, Record.FLOAT32])
def test_a_step_of_v4_leaves_what_the_reference_leaves(
    numba_kernels: Kernels, record: Record, ratio: int, overlaps: bool
) -> None:
    fast = pooled(numba_kernels, record, ratio, overlaps)
    assert_alike(fast, pooled(REFERENCE, record, ratio, overlaps))
