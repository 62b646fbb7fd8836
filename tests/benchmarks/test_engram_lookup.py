"""The table that lookups are measured on: rows that can be told apart, in every layout."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import engram_lookup
from benchmarks.engram_lookup import ROW, fill, tables, variants
from leadline.kernels.reference.engram import gather_rows
from leadline.weights.host_memory import HostMemory


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    monkeypatch.setattr(engram_lookup, "_PIECE", 2**16)
    memory = HostMemory(5000 * ROW)
    fill(memory, 5000, seed=0)
    return memory


def test_rows_are_finite_and_no_two_are_equal(memory: HostMemory) -> None:
    codes, scales = tables(memory, 5000)["as stored"]
    values = gather_rows(codes, scales, torch.arange(5000))
    assert values.isfinite().all()
    assert len(values.unique(dim=0)) == 5000


def test_every_layout_has_whole_finite_rows(memory: HostMemory) -> None:
    for codes, scales in tables(memory, 5000).values():
        assert codes.shape[1] + scales.shape[1] == ROW
        assert gather_rows(codes, scales, torch.arange(len(codes))).isfinite().all()


def test_nothing_is_measured_twice() -> None:
    assert len(set(variants())) == len(list(variants()))
