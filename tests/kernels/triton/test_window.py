"""Rows normalised, rotated, packed and stored in one launch, at the edges of kernels.md 4."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.cache.pool import make_field as pool_field
from leadline.kernels import ops
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import window as reference
from leadline.kernels.reference.kv_store import load_rows
from leadline.kernels.reference.rope import rope_angles, rope_frequencies
from leadline.kernels.triton import window
from tests.kernels.bounds import few_differ

EPS, OUTER, INNER, POISON = 1e-20, 3, 8, 0xA5
PACKED = [Record.FP8_32, Record.FP4_16, Record.FP4_32]


def make_field(record: Record, width: int, device: torch.device) -> RecordField:
    """Values and scales in the same bytes, with a gap behind every page."""
    rotary = 64 if record is Record.FP8_64 else 0
    sizes = record.value_bytes(width, rotary), record.scale_bytes(width, rotary)
    page = torch.full((OUTER, INNER * sum(sizes) + 64), POISON, dtype=torch.uint8, device=device)
    if record is Record.BFLOAT16:
        values = page[:, : INNER * sizes[0]].unflatten(1, (INNER, -1)).view(torch.bfloat16)
        return RecordField(record, values, None)
    if record.scales_last:
        values, scales = page[:, : INNER * sum(sizes)].split([INNER * n for n in sizes], dim=1)
        return RecordField(
            record, values.unflatten(1, (INNER, -1)), scales.unflatten(1, (INNER, -1)), rotary
        )
    rows = page[:, : INNER * sum(sizes)].unflatten(1, (INNER, -1))
    return RecordField(record, *rows.split(list(sizes), dim=-1))


class Rows:
    """Rows for a cache: one all zero, one tiny, some nowhere to go."""

    def __init__(
        self, rows: int, width: int, device: torch.device, *, rank: int = 0, rotary: int = 0
    ) -> None:
        self.down = torch.randn(rows, rank + width, device=device).bfloat16()
        self.down[1:2] = 0
        self.query_weight = torch.rand(rank, device=device) + 0.5
        self.weight = torch.rand(width, device=device) + 0.5
        positions = torch.randint(0, 2**20, (rows,))
        positions[:1], positions[-1:] = 2**20 - 1, 0
        self.cos, self.sin = rope_angles(
            positions.to(device), rope_frequencies(rotary or width // 4, 1e4).to(device)
        )
        # The first place is nobody's: separate steps write there what is to go nowhere.
        place = 1 + torch.randperm(OUTER * INNER - 1, device=device)[:rows]
        self.outer, self.inner = place // INNER, place % INNER
        self.outer[2::3] = -1

    @property
    def x(self) -> Tensor:
        return self.down[:, len(self.query_weight) :]

    def store(self, field: RecordField, how: object = window) -> RecordField:
        store = how.norm_rotate_store  # type: ignore[attr-defined]
        angles = self.cos, self.sin
        store(self.x, self.weight, *angles, field, self.outer, self.inner, eps=EPS)
        return field

    def packed(self, record: Record) -> RecordField:
        """What the quantiser makes of the kernel's own rows in bf16, whatever rounded them."""
        width, device = len(self.weight), self.x.device
        own = self.store(make_field(Record.BFLOAT16, width, device)).values
        field = make_field(record, width, device)
        stored = self.outer >= 0
        places = self.outer[stored], self.inner[stored]
        ops.store_rows(field, *places, *ops.pack_rows(own[places], record, field.rotary))
        return field


def same_bytes(a: RecordField, b: RecordField) -> bool:
    assert a.scales is not None
    assert b.scales is not None
    return torch.equal(a.values, b.values) and torch.equal(a.scales, b.scales)


@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 512), (7, 128)])
def test_stored_rows_are_normalised_and_rotated(
    device: torch.device, rows: int, width: int
) -> None:
    given = Rows(rows, width, device)
    actual = given.store(make_field(Record.BFLOAT16, width, device)).values
    wanted = given.store(make_field(Record.BFLOAT16, width, device), ops).values
    assert few_differ(actual.view(torch.int16), wanted.view(torch.int16), 0.005)
    # A rounding of the norm that falls to the other side turns up in both channels of its pair.
    length = wanted.double().unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
    assert ((actual.double() - wanted.double()).abs() <= 2**-6 * length).all()


@pytest.mark.parametrize("width", [128, 512])
@pytest.mark.parametrize("record", PACKED)
def test_records_are_what_the_quantiser_makes_of_the_very_row(
    device: torch.device, record: Record, width: int
) -> None:
    """Rows with nowhere to go, and gaps, stay as they were."""
    given = Rows(7, width, device)
    actual = given.store(make_field(record, width, device))
    assert same_bytes(actual, given.packed(record))


def test_rotary_channels_are_bf16_in_the_same_bytes(device: torch.device) -> None:
    """Of 512, 64 rotate; the scales end with a byte of zero."""
    given = Rows(7, 512, device, rotary=64)
    actual = given.store(make_field(Record.FP8_64, 512, device))
    assert same_bytes(actual, given.packed(Record.FP8_64))


def test_rows_of_other_widths_take_the_definition(device: torch.device) -> None:
    given = Rows(5, 80, device, rank=96, rotary=16)
    fields = [pool_field(Record.FP8_64, OUTER, INNER, 80, device, 16) for _ in range(2)]
    assert same_bytes(given.store(fields[0]), given.store(fields[1], ops))


@pytest.mark.parametrize("record", PACKED)
def test_tiny_rows_take_the_floor_of_the_scale(device: torch.device, record: Record) -> None:
    given = Rows(4, 128, device)
    given.weight *= 1e-6
    actual = given.store(make_field(record, 128, device))
    assert same_bytes(actual, given.packed(record))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes by numpy
def test_broken_rows_are_stored_broken_or_nowhere(device: torch.device) -> None:
    given = Rows(3, 128, device)
    given.outer[:] = torch.tensor([0, 0, -1])
    given.inner[:] = torch.tensor([0, 1, 0])
    sound = given.store(make_field(Record.FP8_32, 128, device))
    given.down[0], given.down[2] = torch.nan, torch.nan
    broken = given.store(make_field(Record.FP8_32, 128, device))
    rows = load_rows(broken, given.outer[:2], given.inner[:2], torch.float32)
    assert rows[0].isnan().all()
    assert torch.equal(broken.values[0, 1:], sound.values[0, 1:])
    assert torch.equal(broken.values[1:], sound.values[1:])


def test_both_halves_of_a_down_projection(device: torch.device) -> None:
    given = Rows(5, 128, device, rank=96)
    field = make_field(Record.FP8_32, 128, device)
    query = window.norm_query_store_window(
        given.down,
        given.query_weight,
        given.weight,
        given.cos,
        given.sin,
        field,
        given.outer,
        given.inner,
        eps=EPS,
    )
    assert same_bytes(field, given.store(make_field(Record.FP8_32, 128, device)))
    wanted = ops.rms_norm(given.down[:, :96], given.query_weight, eps=EPS)
    torch.testing.assert_close(query, wanted, rtol=2**-7, atol=0)
    assert few_differ(query, wanted)


@dataclass
class Step:
    """Groups of a step, rows of no group behind them, and a field of rings for them."""

    counts: list[int]
    device: torch.device
    window: int = 8
    ring: int = 16
    staging: int = 7

    def __post_init__(self) -> None:
        groups, counts = len(self.counts), torch.tensor(self.counts)
        self.start = torch.randint(0, 50, (groups,))
        self.q_off = torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(self.device)
        group = torch.arange(groups).repeat_interleave(counts)
        place = torch.arange(len(group)) - self.q_off.cpu()[group]
        padding = torch.zeros(3, dtype=torch.int64)
        self.pos = torch.cat((self.start[group] + place, padding)).to(self.device)
        self.req_of_row = torch.cat((group, padding - 1)).to(self.device)
        self.seq_len = (self.start + counts).to(self.device)
        self.slot = (torch.randperm(self.staging - 1)[:groups] + 1).to(self.device)
        self.floor = (self.start - torch.randint(0, 12, (groups,))).clamp(min=0).to(self.device)

    def plan(self, how: object) -> tuple[Tensor, ...]:
        return how.plan_window(  # type: ignore[attr-defined,no-any-return]
            *(self.pos, self.req_of_row, self.q_off, self.seq_len, self.slot, self.floor),
            window=self.window,
            ring=self.ring,
            staging=self.staging,
        )


# Groups that just fit their ring, and just do not; no rows; longer than the ring.
COUNTS = [[1, 1, 1], [9, 10, 1, 0, 2], [0, 25, 40], [3]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_addresses_of_a_window_are_those_of_the_definition(
    device: torch.device, counts: list[int]
) -> None:
    step = Step(counts, device)
    (index, width, outer, inner, seen), wanted = step.plan(window), step.plan(reference)
    assert torch.equal(index, wanted[0])
    assert torch.equal(width[:-3], wanted[1][:-3])
    assert torch.equal(outer, wanted[2])
    assert torch.equal(inner[:-3], wanted[3][:-3])
    assert torch.equal(seen, wanted[4])


@pytest.mark.parametrize("record", [Record.FP8_32, Record.BFLOAT16, Record.FLOAT32], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_staged_rows_come_to_their_rings(
    device: torch.device, counts: list[int], record: Record
) -> None:
    """The newest of long groups, and nothing else."""
    step = Step(counts, device)
    width = 64 if record is Record.FP8_32 else 48
    outer = step.staging + -(-sum(counts) // step.ring)
    field = pool_field(record, outer, step.ring, width, device)
    memory = field.values.untyped_storage()
    fill = torch.empty(0, dtype=torch.uint8, device=device).set_(memory)
    fill.copy_(torch.randint(0, 120, fill.shape, device=device))
    before = fill.clone()

    def commit(how: object) -> Tensor:
        fill.copy_(before)
        how.commit_window(  # type: ignore[attr-defined]
            *(field, step.q_off, step.seq_len, step.slot), window=8, staging=step.staging
        )
        return fill.clone()

    assert torch.equal(commit(window), commit(reference))
    is_long = any(count + step.window - 1 > step.ring for count in counts)
    assert torch.equal(fill, before) != is_long
