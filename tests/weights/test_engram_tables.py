"""Engram tables: exact rows, and nothing but those rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from leadline.kernels.packed import WeightFormat
from leadline.weights.engram_tables import MappedEngramTable
from leadline.weights.formats import decode, encode

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_equal_the_decoded_table(dtype: torch.dtype) -> None:
    codes, scales = encode(WeightFormat.FP8_ROW32, torch.randn(50, 64) * 0.05)
    table = MappedEngramTable(codes.numpy(), scales.numpy(), dtype)
    rows = torch.randint(0, 50, (7, 2, 6))
    gathered = table.gather(rows)
    whole = decode(WeightFormat.FP8_ROW32, codes, scales)
    assert gathered.dtype is dtype
    assert torch.equal(gathered.float(), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_bf16_rows_come_as_they_are(dtype: torch.dtype) -> None:
    values = torch.randn(50, 64).bfloat16()
    table = MappedEngramTable(values.view(torch.uint16).numpy(), None, dtype)
    rows = torch.tensor([[0, 49], [7, 7]])
    assert torch.equal(table.gather(rows), values[rows].to(dtype))


def test_no_rows_give_no_values() -> None:
    table = MappedEngramTable(np.zeros((5, 32), np.float32), None, torch.float32)
    assert table.gather(torch.empty(0, 6, dtype=torch.int64)).shape == (0, 6, 32)


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_outside_is_an_error_that_names_it(row: int) -> None:
    table = MappedEngramTable(np.zeros((5, 32), np.float32), None, torch.float32)
    with pytest.raises(IndexError, match=rf"rows {min(row, 0)}\.\.{max(row, 0)} .* 5 rows"):
        table.gather(torch.tensor([0, row]))


def test_only_the_rows_asked_for_are_read(tmp_path: Path) -> None:
    """A table of 1 TiB, of which the disk holds nothing: a whole read would never end."""
    file = tmp_path / "table"
    rows = 1 << 32
    with file.open("wb") as stream:
        stream.truncate(rows * 256)
    codes = np.memmap(file, np.uint8, "r", shape=(rows, 256))
    scales = np.broadcast_to(np.full(8, 127, np.uint8), (rows, 8))
    table = MappedEngramTable(codes, scales, torch.float32)
    assert not table.gather(torch.tensor([0, rows - 1])).any()
