"""Entries and index keys against their definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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
from leadline.kernels.reference.hadamard import hadamard
from leadline.kernels.triton import compressor
from leadline.models.common.rows import Rows
from tests.kernels.bounds import few_differ

WIDTH, KEY, ROPE, ENTRIES, RING, EPS = 64, 32, 16, 4, 8, 1e-20
FREQUENCIES = 10000.0 ** -(torch.arange(0, ROPE, 2) / ROPE)
WIDE_FREQUENCIES = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
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
    keys: RecordField | None
    ring: Tensor | None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, implementation: Any, dtype: torch.dtype = BF16) -> Tensor:
        """Both ops: the latent; caches and ring change in place."""
        rows = self.rows
        angles = self.angles(rows.pos)
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
            **self.options,
        )
        if self.keys is None:
            return latent
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

    def angles(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Of the entries that end at these positions; more of a wider row turns."""
        frequencies = WIDE_FREQUENCIES if len(self.norm) == 128 else FREQUENCIES
        return ops.rope_angles(pos - self.ratio + 1, frequencies.to(pos.device))

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
            return RecordField(old.record, values, view(old.scales), old.rotary)

        return dataclasses.replace(
            self,
            entries=field(self.entries),
            keys=None if self.keys is None else field(self.keys),
            ring=None if self.ring is None else self.ring.clone(),
        )


def make_rows(
    device: torch.device,
    parts: Sequence[tuple[int, int]],
    *,
    page_size: int,
    write_from: Sequence[int] | None,
) -> Rows:
    """Addresses of requests ``(first position, rows)``, whose pages lie in any order."""
    counts = torch.tensor([n for _, n in parts])
    most_pages = max((p + n) // page_size + 1 for p, n in parts)
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
    return dataclasses.replace(rows, **{name: getattr(rows, name).to(device) for name in tensors})


def make_pooled_step(
    device: torch.device,
    parts: Sequence[tuple[int, int]],
    *,
    ratio: int,
    index: bool = False,
    write_from: Sequence[int] | None = None,
) -> Step:
    """A step of V4's compressors, that of index keys or the main one; those of 4 rows overlap."""
    per_page, halves = 256 // ratio, 1 + (ratio == 4)
    width = KEY if index else 128
    rows = make_rows(device, parts, page_size=256, write_from=write_from)
    record, rotary = (Record.FP4_32, 0) if index else (Record.FP8_64, 64)
    field = make_field(record, 1 + rows.page_table.numel(), per_page, width, device, rotary)
    field.values.copy_(torch.randint(0, 100, field.values.shape))
    columns = halves * width
    parent = 2 * torch.randn(len(rows.pos), 2 * columns + 64, device=device)
    return Step(
        rows=rows,
        ratio=ratio,
        projected=parent[:, 64:],
        norm=(torch.rand(width) + 0.5).to(device),
        weight=torch.empty(0),
        k_norm=torch.empty(0),
        entries=field,
        keys=None,
        ring=torch.randn(len(parts) + 1, max(8, ratio), 2 * columns, device=device),
        options={
            "ape": torch.randn(ratio, columns, device=device),
            "overlaps": ratio == 4,
            "hadamard": index,
        },
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
    rows = make_rows(device, parts, page_size=ENTRIES * ratio, write_from=write_from)
    m, num_pages = len(rows.pos), 1 + rows.page_table.numel()
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


def assert_fields(
    same: Callable[[Tensor, Tensor], bool], actual: RecordField, wanted: RecordField
) -> None:
    """Of their bytes."""
    for a, b in ((actual.values, wanted.values), (actual.scales, wanted.scales)):
        if a is not None and b is not None:
            assert same(a, b)


def check(step: Step) -> None:
    """The kernels against the definition; what is packed against its own latent, exactly."""
    twin, before = step.copy(), step.copy()
    wanted, actual = twin.run(reference), step.run(compressor)
    stored = step.stored
    torch.testing.assert_close(actual[stored], wanted[stored], rtol=2**-7, atol=1e-6)
    assert few_differ(actual[stored], wanted[stored], 0.005)
    if step.ring is not None:
        torch.testing.assert_close(step.ring, twin.ring, rtol=0, atol=0, equal_nan=True)

    rows, ratio = step.rows, step.ratio
    rotated = ops.rotate(actual[stored], *step.angles(rows.pos[stored]))
    if step.options.get("hadamard"):
        rotated = hadamard(rotated)
    page_size = step.entries.values.shape[1] * ratio
    page = rows.page_table[rows.req_of_row[stored], rows.pos[stored] // page_size]
    entry = rows.pos[stored] % page_size // ratio
    packed = kv_store.pack_rows(rotated, step.entries.record, step.entries.rotary)
    kv_store.store_rows(before.entries, page, entry, *packed)
    assert_fields(torch.equal, step.entries, before.entries)
    if step.keys is not None and twin.keys is not None:
        assert_fields(few_differ, step.keys, twin.keys)


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
    assert_fields(torch.equal, step.entries, before.entries)


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


@pytest.mark.parametrize("index", [False, True], ids=["main", "index"])
def test_entries_that_overlap(device: torch.device, index: bool) -> None:
    """Prefill, decode rows that close a group and that do not, a verify step over a page border."""
    parts = [(0, 21), (6, 1), (7, 1), (250, 11), (3, 1), (40, 4)]
    check(make_pooled_step(device, parts, ratio=4, index=index))


@pytest.mark.parametrize("first", range(8))
@pytest.mark.parametrize("count", [3, 13])
def test_overlapping_chunks_begin_anywhere(device: torch.device, first: int, count: int) -> None:
    """The first entries need rows of the ring; before the beginning there are none."""
    step = make_pooled_step(device, [(first, count)], ratio=4)
    assert step.ring is not None
    if first < 4:  # no row of a group before the first
        step.ring[:, first:] = torch.nan
    check(step)


@pytest.mark.parametrize("first", [0, 1, 127, 128, 200])
@pytest.mark.parametrize("count", [1, 130])
def test_groups_of_128(device: torch.device, first: int, count: int) -> None:
    check(make_pooled_step(device, [(first, count)], ratio=128))


def test_many_requests_among_groups_of_128(device: torch.device) -> None:
    """All of them fall into one program of rows, or two, and two of them close a group."""
    parts = [(5, 1), (127, 1), (0, 140), (255, 1), (100, 20), (300, 1)]
    check(make_pooled_step(device, parts, ratio=128, write_from=[0, 128, 0, 0, 0, 0]))


def test_replayed_entries_that_overlap(device: torch.device) -> None:
    parts, write_from = [(3, 19), (20, 8), (5, 2)], [12, 28, 0]
    check(make_pooled_step(device, parts, ratio=4, write_from=write_from))


def test_entries_of_other_widths_take_separate_steps(device: torch.device) -> None:
    step = make_pooled_step(device, [(0, 9), (6, 3)], ratio=4)
    step.projected = step.projected[:, : 2 * 2 * 80]
    step.norm, step.options["ape"] = step.norm[:80], step.options["ape"][:, :160].contiguous()
    assert step.ring is not None
    step.ring = step.ring[..., : 2 * 2 * 80].contiguous()
    step.entries = make_field(Record.FP8_64, 9, 64, 80, device, 16)
    assert not step.entries.values.any()
    twin = step.copy()
    step.run(compressor)
    twin.run(reference)
    assert_fields(few_differ, step.entries, twin.entries)
    assert step.entries.values.any()
