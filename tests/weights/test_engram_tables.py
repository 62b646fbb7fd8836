"""Engram tables: exact rows, and nothing but those rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from leadline.kernels.packed import WeightFormat
from leadline.kernels.registry import choose
from leadline.weights.engram_tables import MappedEngramTable, TableMemory
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


def packed_table(rows: int = 50) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    codes, scales = encode(WeightFormat.FP8_ROW32, torch.randn(rows, 64) * 0.05)
    return codes.numpy(), scales.numpy(), decode(WeightFormat.FP8_ROW32, codes, scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_rows_of_a_copy_in_memory_equal_the_decoded_table(
    dtype: torch.dtype, shared: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    codes, scales, whole = packed_table()
    memory = TableMemory(torch.device("cpu"), tmp_path if shared else None)
    with caplog.at_level("INFO"):
        table = memory.load("layers.1.table", codes, scales, dtype, stamp="1")
    rows = torch.randint(0, 50, (7, 2, 6))
    gathered = table.gather(rows)
    assert gathered.dtype is dtype
    assert torch.equal(gathered.float(), whole[rows])
    assert "layers.1.table: 0.0 GB in " in caplog.text
    assert "% in huge pages" in caplog.text


def test_tables_are_shared_by_their_stamp(tmp_path: Path) -> None:
    """The second engine of a host finds what the first one copied, and only that."""
    memory, rows = TableMemory(torch.device("cpu"), tmp_path), torch.arange(50)
    codes, scales, whole = packed_table()
    memory.load("table", codes, scales, torch.float32, stamp="one checkpoint")
    codes, scales, other = packed_table()
    found = memory.load("table", codes, scales, torch.float32, stamp="one checkpoint")
    assert torch.equal(found.gather(rows), whole)
    changed = memory.load("table", codes, scales, torch.float32, stamp="another")
    assert torch.equal(changed.gather(rows), other)
    assert len(list(tmp_path.glob("leadline-engram-*.table"))) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_gpu_gathers_rows_of_registered_memory(backend: str) -> None:
    device = torch.device("cuda")
    codes, scales, whole = packed_table()
    table = TableMemory(device).load("table", codes, scales, torch.bfloat16, stamp="")
    rows = torch.randint(0, 50, (5, 6), device=device)
    with choose(backend, device, torch.bfloat16).active():
        assert torch.equal(table.gather(rows).cpu().float(), whole[rows.cpu()])
