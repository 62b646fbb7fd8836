"""Pooling of closed groups, and entries of any steps against those of a whole sequence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from leadline.cache.pool import make_field
from leadline.kernels import ops
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference.compressor import compress
from leadline.kernels.reference.hadamard import hadamard
from leadline.kernels.registry import Kernels


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_equals_a_loop_over_channels(ratio: int) -> None:
    values, gates = torch.randn(2, 3, ratio, 5).double()
    got = compress(values, gates)
    for group in range(3):
        for channel in range(5):
            weights = [math.exp(g) for g in gates[group, :, channel].tolist()]
            pairs = zip(weights, values[group, :, channel].tolist(), strict=True)
            wanted = sum(w * v for w, v in pairs) / sum(weights)
            assert math.isclose(got[group, channel], wanted, rel_tol=1e-12, abs_tol=1e-14)


def test_equal_gates_give_the_mean() -> None:
    values = torch.randn(2, 4, 8)
    torch.testing.assert_close(compress(values, torch.full((2, 4, 8), 7.0)), values.mean(1))


def test_huge_gates_pick_one_row() -> None:
    values, gates = torch.randn(1, 2, 8), torch.zeros(1, 2, 8)
    gates[:, 1] = 1e4
    assert torch.equal(compress(values, gates), values[:, 1])


def test_no_closed_group_gives_no_entry() -> None:
    assert compress(torch.empty(0, 2, 8), torch.empty(0, 2, 8)).shape == (0, 8)


WIDTH, PER_PAGE, EPS, FREQUENCIES = 8, 4, 1e-6, torch.tensor([1.0, 0.1])
LENGTH = 41


class Compressor:
    """One of V4: what it makes of a sequence by formula, and what the op stores step by step."""

    def __init__(self, ratio: int, *, overlaps: bool, hadamard: bool = False) -> None:
        generator = torch.Generator().manual_seed(ratio)
        self.ratio, self.overlaps, self.hadamard = ratio, overlaps, hadamard
        self.width = (2 if overlaps else 1) * WIDTH  # of values, and of gates
        self.count = LENGTH // ratio
        self.ape = torch.randn(ratio, self.width, generator=generator).double()
        self.norm = torch.rand(WIDTH, generator=generator).double() + 0.5
        self.rows = torch.randn(LENGTH, 2 * self.width, generator=generator).double()

    def entry(self, j: int) -> Tensor:
        """v4-model 3.3, a channel at a time."""
        values, gates = self.rows.chunk(2, dim=1)
        own, pooled = range(self.ratio * j, self.ratio * j + self.ratio), []
        for channel in range(WIDTH):
            slots = [(t, self.width - WIDTH + channel) for t in own]
            if self.overlaps and j:
                slots += [(t - self.ratio, channel) for t in own]
            weights = [math.exp(gates[t, c] + self.ape[t % self.ratio, c]) for t, c in slots]
            terms = [w * float(values[slot]) for w, slot in zip(weights, slots, strict=True)]
            pooled.append(sum(terms) / sum(weights))
        latent = ops.rms_norm(torch.tensor([pooled]).double(), self.norm, eps=EPS)
        turned = ops.rotate(latent, *ops.rope_angles(torch.tensor([self.ratio * j]), FREQUENCIES))
        return hadamard(turned)[0] if self.hadamard else turned[0]

    @property
    def entries(self) -> Tensor:
        return torch.stack([self.entry(j) for j in range(self.count)]).float()

    def memory(self, ring: int) -> tuple[RecordField, Tensor]:
        """Pages, and rings in which a request before left what must not be seen."""
        entries = make_field(Record.FLOAT32, 4, PER_PAGE, WIDTH, "cpu")
        return entries, torch.full((3, ring, 2 * self.width), math.nan).double()

    def store(
        self,
        steps: list[int],
        entries: RecordField,
        rings: Tensor,
        *,
        start: int = 0,
        write_from: int = 0,
    ) -> None:
        """The sequence from ``start`` on in steps of so many rows, beside padding."""
        for count in steps:
            rows = self.rows[start : start + count]
            pos = torch.cat((torch.arange(start, start + count), torch.zeros(2, dtype=torch.int64)))
            start += count
            ops.store_entries(
                torch.cat((rows, torch.full_like(self.rows[:2], math.nan))),
                self.norm,
                *ops.rope_angles(pos - self.ratio + 1, FREQUENCIES),
                pos,
                torch.tensor([0] * count + [-1, -1]),
                torch.tensor([0, count, count]),
                torch.tensor([2, 0]),
                torch.tensor([start, 0]),
                torch.tensor([write_from, 0]),
                torch.tensor([[3, 1, 2], [0, 0, 0]]),
                entries,
                rings,
                ratio=self.ratio,
                eps=EPS,
                dtype=torch.float64,
                ape=self.ape,
                overlaps=self.overlaps,
                hadamard=self.hadamard,
            )


def stored(entries: RecordField, count: int) -> Tensor:
    pages = torch.tensor([3, 1, 2])
    return torch.stack([entries.values[pages[j // PER_PAGE], j % PER_PAGE] for j in range(count)])


BACKENDS = {"reference": Kernels({}), "unfused": Kernels({"store_entries": "unfused"})}
COMPRESSORS = {
    "overlap": Compressor(4, overlaps=True),
    "index": Compressor(4, overlaps=True, hadamard=True),
    "dense": Compressor(16, overlaps=False),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize(
    "steps", [[41], [1] * 41, [3, 5, 7, 1, 2, 9, 14], [6, 35], [33, 8]], ids=str
)
def test_entries_are_those_of_the_formula_in_any_steps(
    backend: str, kind: str, steps: list[int]
) -> None:
    compressor = COMPRESSORS[kind]
    least = compressor.ratio * compressor.width // WIDTH - 1
    entries, rings = compressor.memory(least)
    with BACKENDS[backend].active():
        compressor.store(steps, entries, rings)
    got = stored(entries, compressor.count)
    torch.testing.assert_close(got, compressor.entries, rtol=1e-5, atol=1e-6)
    used = entries.values.abs().sum((1, 2)) > 0
    assert used.tolist() == [False, compressor.count > 4, compressor.count > 8, True]


def test_first_entry_of_an_overlap_is_a_pool_of_second_halves() -> None:
    compressor = COMPRESSORS["overlap"]
    values, gates = compressor.rows[:4].chunk(2, dim=1)
    pooled = compress(values[None, :, WIDTH:], (gates + compressor.ape)[None, :, WIDTH:])
    wanted = ops.rms_norm(pooled, compressor.norm, eps=EPS)  # which position 0 does not turn
    torch.testing.assert_close(compressor.entry(0), wanted[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_rows_are_all_that_an_overlap_needs_of_the_past(backend: str) -> None:
    compressor = COMPRESSORS["overlap"]
    before, after = compressor.memory(8), compressor.memory(8)
    with BACKENDS[backend].active():
        for entries, rings in (before, after):
            compressor.store([16], entries, rings)
        (entries, rings), (spoilt, lost) = before, after
        rings[2, [16 - back & 7 for back in (5, 6, 7, 8)]] = math.nan
        lost[2] = 0
        compressor.store([3, 8], entries, rings, start=16, write_from=16)
        compressor.store([3, 8], spoilt, lost, start=16, write_from=16)
    wanted = compressor.entries[:6]
    torch.testing.assert_close(stored(entries, 6), wanted, rtol=1e-5, atol=1e-6)
    same = torch.isclose(stored(spoilt, 6), wanted, rtol=1e-5, atol=1e-6).all(1)
    assert same.tolist() == [True] * 4 + [False, True]


def test_a_token_is_seen_by_its_own_entry_and_by_the_next_of_an_overlap() -> None:
    before, changed = COMPRESSORS["overlap"].entries, Compressor(4, overlaps=True)
    changed.rows[17] += 1
    assert (before != changed.entries).any(1).nonzero().flatten().tolist() == [4, 5]
