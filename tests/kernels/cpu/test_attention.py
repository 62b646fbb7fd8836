"""Sparse attention over packed and plain entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.kernels import ops
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference.quant import quantize_fp8_32
from leadline.kernels.reference.rope import rope_angles, rope_frequencies
from leadline.kernels.registry import Kernels
from tests.kernels.conftest import V41_RECORDS
from tests.kernels.cpu.conftest import Both

HEADS, WIDTH, ROTARY = 3, 96, 32


def make_field(record: Record, outer: int, inner: int) -> RecordField:
    rotary = ROTARY if record is Record.FP8_64 else 0
    packed = ops.pack_rows(torch.randn(outer, inner, WIDTH), record, rotary)
    return RecordField(record, *packed, rotary)


def case(rows: int, record: Record | None, window: Record = Record.FP8_32) -> dict[str, Any]:
    """Two requests over shuffled pages of eight entries; rows see from nothing to everything."""
    window_index = torch.randint(0, 20, (rows, 6))
    selected = torch.stack([torch.randperm(24)[:7].sort().values for _ in range(rows)])
    window_index[1:2, 3:] = -1
    selected[2:3, 2:] = -1
    window_index[3:4], selected[3:5] = -1, -1
    cos, sin = rope_angles(torch.arange(rows) * 3, rope_frequencies(ROTARY, 10000.0))
    kv = record and make_field(record, 6, 8)
    return {
        "q": 2 * torch.randn(rows, HEADS, WIDTH),
        "cos": cos,
        "sin": sin,
        "window": make_field(window, 4, 5),
        "window_index": window_index,
        "window_width": torch.full((rows,), 6),
        "kv": kv,
        "page_table": torch.tensor([[5, 1, 3], [2, 0, 4]]),
        "req_of_row": (torch.arange(rows) >= 4).long(),
        "selected": None if kv is None else selected,
        "sink": torch.randn(HEADS),
    }


def attend(both: Both, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    fast, wanted = both("sparse_attention", *arguments.values(), exact_rounding=True)
    return fast, wanted


@pytest.mark.parametrize("record", [None, *V41_RECORDS], ids=str)
@pytest.mark.parametrize("rows", [1, 7])
def test_sparse_attention(both: Both, rows: int, record: Record | None) -> None:
    torch.testing.assert_close(*attend(both, case(rows, record)), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("record", [Record.FP8_64, Record.FP8_32, Record.BFLOAT16, Record.FLOAT32])
def test_every_visible_entry(both: Both, record: Record) -> None:
    """None, all of 24, and more than fill a page; no list names them."""
    arguments = case(7, record, record)
    arguments["selected"] = None
    visible = torch.tensor([0, 24, 9, 0, 3, 8, 1])
    fast, wanted = both(
        "sparse_attention", *arguments.values(), exact_rounding=True, visible=visible
    )
    torch.testing.assert_close(fast, wanted, rtol=2e-5, atol=2e-6)
    assert not fast[3].any()  # whose window is empty, too


def test_rows_with_rotary_channels(both: Both) -> None:
    torch.testing.assert_close(
        *attend(both, case(7, Record.FP8_64, Record.FP8_64)), rtol=2e-5, atol=2e-6
    )


def test_lse_and_outputs_in_fp8(numba_kernels: Kernels) -> None:
    arguments = case(7, Record.FP4_16).values()
    fast, wanted = torch.full((2, 7, HEADS), torch.nan)
    codes = torch.empty(7, HEADS, WIDTH, dtype=torch.uint8)
    fp8 = codes, codes[..., : WIDTH // 32].clone()
    with numba_kernels.active():
        out = ops.sparse_attention(*arguments, exact_rounding=True, lse=fast, fp8=fp8)
    for made, encoded in zip(fp8, quantize_fp8_32(out), strict=True):
        assert torch.equal(made, encoded)
    ops.sparse_attention(*arguments, exact_rounding=True, lse=wanted)
    assert (fast[3] == -torch.inf).all()
    torch.testing.assert_close(fast, wanted, rtol=2e-6, atol=2e-6)


def test_windows_may_be_plain(both: Both) -> None:
    arguments = case(7, Record.FP4_16, Record.FLOAT32)
    torch.testing.assert_close(*attend(both, arguments), rtol=2e-5, atol=2e-6)


def test_rows_without_keys_give_zero(both: Both) -> None:
    arguments = case(5, Record.FP4_16)
    arguments["sink"][0] = -torch.inf
    fast, wanted = attend(both, arguments)
    assert not fast[3].any()
    assert not wanted[3].any()


def test_no_selected_entry_is_the_window_alone(both: Both) -> None:
    arguments = case(7, Record.FP4_16)
    arguments["selected"] = arguments["selected"][:, :0]
    fast, wanted = attend(both, arguments)
    torch.testing.assert_close(fast, wanted, rtol=2e-5, atol=2e-6)


def test_what_lies_in_unused_places_changes_nothing(both: Both) -> None:
    arguments = case(7, Record.FP8_32)
    fast, _ = attend(both, arguments)
    kv, used = arguments["kv"], arguments["selected"]
    unread = torch.ones(6, 8, dtype=torch.bool)
    for row, entries in enumerate(used.tolist()):
        for entry in (e for e in entries if e >= 0):
            table = arguments["page_table"][arguments["req_of_row"][row]]
            unread[table[entry // 8], entry % 8] = False
    kv.scales[unread] = 255  # NaN
    assert torch.equal(attend(both, arguments)[0], fast)


def test_a_broken_key_breaks_the_rows_that_see_it(both: Both) -> None:
    arguments = case(7, None, Record.FLOAT32)
    arguments["window"].values[divmod(int(arguments["window_index"][0, 0]), 5)] = torch.nan
    fast, wanted = attend(both, arguments)
    assert fast[0].isnan().all()
    assert torch.equal(fast.isnan(), wanted.isnan())


@pytest.mark.parametrize("size", [1e3, 1e-3])
def test_scores_far_apart_and_close_together(both: Both, size: float) -> None:
    arguments = case(7, Record.FP4_16)
    arguments["q"] *= size
    torch.testing.assert_close(*attend(both, arguments), rtol=1e-4, atol=1e-4)
