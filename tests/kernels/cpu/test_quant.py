"""Rounding and packing are the reference's, bit for bit: they start from the same values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from leadline.kernels import ops
from leadline.kernels.packed import LinearWeight, RecordField, WeightFormat
from leadline.kernels.records import Record
from leadline.kernels.registry import REFERENCE, Kernels
from tests.kernels.conftest import V41_RECORDS
from tests.kernels.cpu.conftest import Both

PACKED = (Record.FP8_32, Record.FP4_16, Record.FP4_32)
BROKEN = (math.inf, -math.inf, math.nan)


def spread(*shape: int) -> Tensor:
    """Values over some sixty octaves, a block of zeros among them."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-40, 20, (*shape[:-1], 1)).float())
    x[..., :32] = torch.tensor([0.0, -0.0]).repeat(16)
    return x


def on_borders() -> Tensor:
    """Every midpoint between two neighbours of E4M3 and of E2M1, and its float32 neighbours.

    A block's scale is 1: its largest value is that of the format.
    """
    rows = []
    for codes, largest in ((torch.arange(127), 448.0), (torch.arange(8), 6.0)):
        decode = torch.float8_e4m3fn if largest == 448 else None
        grid = (
            codes.to(torch.uint8).view(decode).float()
            if decode
            else torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
        )
        middle = (grid[1:] + grid[:-1]) / 2
        values = torch.cat((grid, middle))
        near = [values, torch.nextafter(values, torch.tensor(0.0)), values * (1 + 2.0**-23)]
        flat = torch.cat([*near, *(-v for v in near)])
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % 30)).view(-1, 30)
        ends = torch.full((len(flat), 1), largest)
        rows.append(torch.cat((flat, ends, -ends), dim=1))
    return torch.cat(rows)


INPUTS: dict[str, Callable[[], Tensor]] = {
    "octaves": lambda: spread(33, 96),
    "borders": on_borders,
    "one row": lambda: torch.randn(1, 64),
    "no rows": lambda: torch.empty(0, 64),
    "with gaps": lambda: torch.randn(5, 128)[:, ::2],
    "smallest": lambda: torch.full((2, 32), 1e-45),
    "largest": lambda: torch.full((2, 32), 3e38),
}


@pytest.mark.parametrize("record", PACKED)
@pytest.mark.parametrize("values", INPUTS)
def test_packed_bytes_are_those_of_the_reference(both: Both, values: str, record: Record) -> None:
    (codes, scales), (wanted_codes, wanted_scales) = both("pack_rows", INPUTS[values](), record)
    assert torch.equal(codes, wanted_codes)
    assert torch.equal(scales, wanted_scales)


@pytest.mark.parametrize("record", PACKED)
def test_every_byte_unpacks_as_in_the_reference(both: Both, record: Record) -> None:
    codes = torch.randint(256, (40, record.value_bytes(64)), dtype=torch.uint8)
    scales = torch.arange(40 * record.scale_bytes(64)).to(torch.uint8).view(40, -1)
    fast, wanted = both("unpack_rows", codes, scales, record, torch.float32)
    torch.testing.assert_close(fast, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("record", PACKED)
@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_a_broken_row_stays_broken_and_alone(both: Both, record: Record, broken: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = broken
    fast, wanted = (
        ops.unpack_rows(codes, scales, record, torch.float32)
        for codes, scales in both("pack_rows", x, record)
    )
    torch.testing.assert_close(fast, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 2, 32), (1, 4, 32), (9, 3, 64)], ids=str)
def test_index_queries_round_as_in_the_reference(both: Both, shape: tuple[int, ...]) -> None:
    assert torch.equal(*both("quantize_index_query", spread(*shape)))


ROTARY_ROWS: dict[str, Callable[[], Tensor]] = {
    "octaves": lambda: spread(33, 144),
    "no rows": lambda: torch.empty(0, 80),
    "smallest": lambda: torch.full((2, 80), 1e-45),
    "largest": lambda: torch.full((2, 80), 3e38),
    "infinite": lambda: torch.full((2, 80), math.inf),
}


@pytest.mark.parametrize("values", ROTARY_ROWS)
def test_rotary_channels_are_bf16_in_the_same_bytes(both: Both, values: str) -> None:
    (codes, scales), wanted = both("pack_rows", ROTARY_ROWS[values](), Record.FP8_64, 16)
    assert torch.equal(codes, wanted[0])
    assert torch.equal(scales, wanted[1])
    fast, decoded = both("unpack_rows", *wanted, Record.FP8_64, torch.float32, 16)
    torch.testing.assert_close(fast, decoded, rtol=0, atol=0, equal_nan=True)


def test_broken_rotary_channels_stay_broken_and_alone(both: Both) -> None:
    x = torch.randn(3, 80)
    x[1, 70] = math.nan
    for codes, scales in both("pack_rows", x, Record.FP8_64, 16):
        decoded = ops.unpack_rows(codes, scales, Record.FP8_64, torch.float32, 16)
        assert decoded.isnan().nonzero().tolist() == [[1, 70]]


@pytest.mark.parametrize("format", [WeightFormat.FP8_BLOCK32, WeightFormat.PLAIN])
@pytest.mark.parametrize("input_block", [32, 128])
@pytest.mark.parametrize("values", INPUTS)
def test_linear_multiplies_the_same_values(
    both: Both, values: str, input_block: int, format: WeightFormat
) -> None:
    """The last block of a row may be partial."""
    x = INPUTS[values]()
    weight = LinearWeight(torch.randn(24, x.shape[1]), format, input_block)
    assert torch.equal(*both("linear", x, weight))


@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_linear_of_a_broken_row_is_broken(both: Both, broken: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = broken
    weight = LinearWeight(torch.randn(24, 64), WeightFormat.FP8_BLOCK32)
    fast, wanted = both("linear", x, weight)
    torch.testing.assert_close(fast, wanted, rtol=0, atol=0, equal_nan=True)
    assert fast[1].isnan().all()


def empty_field(record: Record) -> RecordField:
    """Three pages of eight rows of 64 channels; values and scales are views of the same bytes."""
    if record in (Record.BFLOAT16, Record.FLOAT32):
        return RecordField(record, torch.zeros(3, 8, 64, dtype=getattr(torch, record)), None)
    stored = torch.zeros(3, 8, record.num_bytes(64), dtype=torch.uint8)
    width = record.value_bytes(64)
    return RecordField(record, stored[..., :width], stored[..., width:])


@pytest.mark.parametrize("record", V41_RECORDS)
@pytest.mark.parametrize("rows", [[], [4, 0, 2], None], ids=str)
def test_storing_writes_the_chosen_rows(
    numba_kernels: Kernels, record: Record, rows: list[int] | None
) -> None:
    packed = ops.pack_rows(torch.randn(5, 64), record)
    places = torch.randperm(24)[: 5 if rows is None else len(rows)]
    chosen = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    fields = []
    for kernels in (numba_kernels, REFERENCE):
        fields.append(empty_field(record))
        with kernels.active():
            ops.store_rows(fields[-1], places // 8, places % 8, *packed, rows=chosen)
    fast, wanted = fields
    assert torch.equal(fast.values, wanted.values)
    if fast.scales is not None and wanted.scales is not None:
        assert torch.equal(fast.scales, wanted.scales)
