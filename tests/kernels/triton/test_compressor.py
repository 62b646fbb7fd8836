"""Entries and index keys against their definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.cache.pool import make_field
from leadline.kernels import ops
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import compressor as reference
from leadline.kernels.reference import kv_store
from leadline.kernels.triton import compressor
from leadline.models.common.rows import Rows

WIDTH, KEY, ROPE, ENTRIES, RING, EPS = 64, 32, 16, 4, 8, 1e-20
FREQUENCIES = 10000.0 ** -(torch.arange(0, ROPE, 2) / ROPE)
BF16 = torch.bfloat16


@dataclasses.dataclass
class Step:
    """Addresses of a step, and what its kernels read and write."""

    rows: Rows
    ratio: int
    projected: Tensor
    norm: Tensor
    weight: Tensor
    k_norm: Tensor
    entries: RecordField
    keys: RecordField
    ring: Tensor | None

    def run(self, implementation: Any, dtype: torch.dtype = BF16) -> Tensor:
        """Both ops: the latent; caches and ring change in place."""
        rows = self.rows
        angles = ops.rope_angles(rows.pos - self.ratio + 1, FREQUENCIES.to(rows.pos.device))
        latent: Tensor = implementation.store_entries(
            self.projected,
            self.norm,
            *angles,
            rows.pos,
            rows.req_of_row,
            rows.q_off,
            rows.slot,
            rows.seq_len,
            rows.write_from,
            rows.page_table,
            self.entries,
            self.ring,
            ratio=self.ratio,
            eps=EPS,
            dtype=dtype,
        )
        implementation.store_index_keys(
            latent,
            self.weight,
            self.k_norm,
            *angles,
            rows.pos,
            rows.req_of_row,
            rows.write_from,
            rows.page_table,
            self.keys,
            ratio=self.ratio,
            eps=EPS,
        )
        return latent

    @property
    def stored(self) -> Tensor:
        """``[m]`` bool: rows that store an entry."""
        pos, group = self.rows.pos, self.rows.req_of_row
        closes = (pos + 1) % self.ratio == 0
        return closes & (group >= 0) & (pos >= self.rows.write_from[group])

    def copy(self) -> Step:
        def field(old: RecordField) -> RecordField:
            storage = old.values.untyped_storage().clone()

            def view(t: Tensor | None) -> Tensor | None:
                if t is None:
                    return None
                out = t.new_empty(0)
                return out.set_(storage, t.storage_offset(), t.shape, t.stride())

            values = view(old.values)
            assert values is not None
            return RecordField(old.record, values, view(old.scales))

        ring = None if self.ring is None else self.ring.clone()
        return dataclasses.replace(
            self, entries=field(self.entries), keys=field(self.keys), ring=ring
        )


def make_step(
    device: torch.device,
    parts: Sequence[tuple[int, int]],
    *,
    ratio: int,
    record: Record = Record.FP4_16,
    key_record: Record = Record.FP4_32,
    write_from: Sequence[int] | None = None,
) -> Step:
    """A step of requests ``(first position, rows)``, caches and rings full of something."""
    counts = torch.tensor([n for _, n in parts])
    most_pages = max((p + n) // (ENTRIES * ratio) + 1 for p, n in parts)
    pages = 1 + torch.randperm(len(parts) * most_pages).reshape(len(parts), -1)
    rows = Rows(
        pos=torch.cat([torch.arange(p, p + n) for p, n in parts]),
        req_of_row=torch.repeat_interleave(torch.arange(len(parts)), counts),
        q_off=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
        slot=1 + torch.randperm(len(parts)),
        seq_len=torch.tensor([p + n for p, n in parts]),
        write_from=torch.tensor(write_from or [0] * len(parts)),
        page_table=pages,
        max_len=max(p + n for p, n in parts),
    )
    tensors = {f.name for f in dataclasses.fields(rows)} - {"max_len"}
    rows = dataclasses.replace(rows, **{name: getattr(rows, name).to(device) for name in tensors})
    m, num_pages = len(rows.pos), 1 + pages.numel()
    ring = None
    if ratio == 1:
        projected = torch.randn(m, WIDTH, dtype=BF16)
    else:
        projected = 2 * torch.randn(m, 2 * WIDTH)
        ring = torch.randn(len(parts) + 1, RING, 2 * WIDTH, device=device)
    fields = []
    for kind, width in ((record, WIDTH), (key_record, KEY)):
        field = make_field(kind, num_pages, ENTRIES, width, device)
        field.values.copy_(torch.randint(0, 100, field.values.shape))
        fields.append(field)
    return Step(
        rows=rows,
        ratio=ratio,
        projected=projected.to(device),
        norm=(torch.rand(WIDTH) + 0.5).to(device),
        weight=torch.randn(KEY, WIDTH, dtype=BF16).to(device),
        k_norm=(torch.rand(KEY) + 0.5).to(device),
        entries=fields[0],
        keys=fields[1],
        ring=ring,
    )


def assert_same_field(actual: RecordField, wanted: RecordField, *, but: float = 0.0) -> None:
    """Same bytes, except for a share of them."""
    for a, b in ((actual.values, wanted.values), (actual.scales, wanted.scales)):
        if a is not None and b is not None:
            assert (a != b).float().mean() <= but


def check(step: Step) -> None:
    """The kernels against the definition; what is packed against its own latent, exactly."""
    twin, before = step.copy(), step.copy()
    wanted, actual = twin.run(reference), step.run(compressor)
    stored = step.stored
    torch.testing.assert_close(actual[stored], wanted[stored], rtol=2**-7, atol=1e-6)
    assert (actual[stored] != wanted[stored]).sum() <= 0.005 * stored.sum() * WIDTH
    if step.ring is not None:
        assert torch.equal(step.ring, twin.ring)  # type: ignore[arg-type]

    rows, ratio = step.rows, step.ratio
    angles = ops.rope_angles(rows.pos[stored] - ratio + 1, FREQUENCIES.to(rows.pos.device))
    rotated = ops.rotate(actual[stored], *angles)
    page_size = ENTRIES * ratio
    page = rows.page_table[rows.req_of_row[stored], rows.pos[stored] // page_size]
    entry = rows.pos[stored] % page_size // ratio
    record = step.entries.record
    kv_store.store_rows(before.entries, page, entry, *kv_store.pack_rows(rotated, record))
    assert_same_field(step.entries, before.entries)
    assert_same_field(step.keys, twin.keys, but=0.01)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_several_requests_in_one_step(device: torch.device, ratio: int) -> None:
    """Prefill, decode rows, a verify step that closes several groups; a page border in each."""
    check(make_step(device, [(0, 21), (6, 1), (7, 1), (13, 7), (1, 1), (40, 4)], ratio=ratio))


@pytest.mark.parametrize("ratio", [1, 2])
def test_latents_are_close_to_float64(device: torch.device, ratio: int) -> None:
    step = make_step(device, [(3, 6), (8, 2)], ratio=ratio)
    wide = step.copy()
    for name in ("projected", "norm", "weight", "k_norm"):
        setattr(wide, name, getattr(wide, name).double())
    wide.ring = None if wide.ring is None else wide.ring.double()
    wanted, actual = wide.run(reference, torch.float64), step.run(compressor)
    stored = step.stored
    error = (actual[stored].double() - wanted[stored]).norm() / wanted[stored].norm()
    assert error <= 3e-3


@pytest.mark.parametrize("first", [4, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 17])
def test_chunks_begin_at_every_offset_of_a_group(
    device: torch.device, first: int, count: int
) -> None:
    """Also where a new row takes the place of the one that the open group still needs."""
    check(make_step(device, [(first, count)], ratio=2))


@pytest.mark.parametrize("first", range(4))
def test_open_groups_of_four(device: torch.device, first: int) -> None:
    check(make_step(device, [(4 + first, 6), (first, 1)], ratio=4))


@pytest.mark.parametrize("record", [Record.FP8_32, Record.BFLOAT16, Record.FLOAT32])
def test_other_records(device: torch.device, record: Record) -> None:
    check(make_step(device, [(3, 6), (8, 2)], ratio=2, record=record, key_record=record))


@pytest.mark.parametrize("ratio", [1, 2])
def test_replayed_rows_write_nothing(device: torch.device, ratio: int) -> None:
    """Entries below ``write_from`` stay; the group that closes at it is written."""
    parts, write_from = [(3, 9), (20, 8), (5, 2)], [6, 28, 0]
    check(make_step(device, parts, ratio=ratio, write_from=write_from))


def test_padding_touches_nothing(device: torch.device) -> None:
    """Rows of no request, NaN in them, and requests without rows."""
    step = make_step(device, [(2, 3), (7, 0), (3, 2)], ratio=2)
    pad = 3
    rows = step.rows
    step.rows = dataclasses.replace(
        rows,
        pos=torch.cat((rows.pos, rows.pos.new_full((pad,), 1))),
        req_of_row=torch.cat((rows.req_of_row, rows.req_of_row.new_full((pad,), -1))),
    )
    nan = step.projected.new_full((pad, 2 * WIDTH), torch.nan)
    step.projected = torch.cat((step.projected, nan))
    check(step)


def test_a_step_without_rows(device: torch.device) -> None:
    step = make_step(device, [(2, 0)], ratio=2)
    before = step.copy()
    assert step.run(compressor).shape == (0, WIDTH)
    assert_same_field(step.entries, before.entries)


def test_positions_near_a_million(device: torch.device) -> None:
    step = make_step(device, [(0, 6), (1, 3)], ratio=2)
    pos = step.rows.pos
    distant = pos + 2**20 - 8
    table = step.rows.page_table
    wide = torch.zeros(2, 2**20 // 8 + 2, dtype=torch.int64, device=device)
    wide[:, -3:] = table[:, :1]
    step.rows = dataclasses.replace(
        step.rows, pos=distant, seq_len=step.rows.seq_len + 2**20 - 8, page_table=wide
    )
    # Groups of both pages would share entries of one: leave the first request alone.
    step.rows.write_from[1] = 2**21
    check(step)


def test_large_gates_choose_one_row(device: torch.device) -> None:
    step = make_step(device, [(0, 8), (3, 3)], ratio=2)
    step.projected[:, WIDTH:] = 1e4 * torch.randn(()).sign() * (-1.0) ** step.rows.pos[:, None]
    check(step)


def test_zero_latents_and_ties_of_codes(device: torch.device) -> None:
    """A zero row takes the scale's floor; an entry of ties is packed as the definition does."""
    step = make_step(device, [(0, 4)], ratio=1)
    step.projected[0] = 0
    grid = torch.tensor([0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0, 6.0])
    step.projected[1:] = grid.repeat(WIDTH // 8).to(BF16)
    step.norm.fill_(float(grid.square().mean().sqrt()))
    check(step)
