"""Index scores and selections."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from leadline.kernels import ops
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from tests.kernels.cpu.conftest import Both

# Few different scores, so that ties are frequent; -0.0 equals 0.0.
SCORES = st.sampled_from([math.nan, math.inf, -math.inf, -1.5, -0.0, 0.0, 0.5, 2.0, 1e-45])
ROWS = st.integers(1, 24).flatmap(
    lambda n: st.lists(st.lists(SCORES, min_size=n, max_size=n), min_size=1, max_size=3)
)
# The fixture has no state.
one_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(rows=ROWS, k=st.integers(1, 26))
@one_fixture
def test_select_top_k(both: Both, rows: list[list[float]], k: int) -> None:
    assert torch.equal(*both("select_top_k", torch.tensor(rows), k))


@pytest.mark.parametrize("k", [1, 511, 512, 513, 3000])
def test_select_top_k_of_many_entries_with_ties(both: Both, k: int) -> None:
    scores = torch.randn(3, 2000).bfloat16().float()
    scores[0] = scores[0].sort().values
    scores[1, 100:] = -math.inf
    assert torch.equal(*both("select_top_k", scores, k))


@given(rows=ROWS, k=st.integers(1, 26), data=st.data())
@one_fixture
def test_select_top_k_of_what_is_visible(
    both: Both, rows: list[list[float]], k: int, data: st.DataObject
) -> None:
    visible = torch.tensor([data.draw(st.integers(0, len(row))) for row in rows])
    assert torch.equal(*both("select_top_k", torch.tensor(rows), k, visible))


@given(rows=ROWS, size=st.integers(1, 9), k=st.integers(1, 9), data=st.data())
@one_fixture
def test_select_candidate_blocks(
    both: Both, rows: list[list[float]], size: int, k: int, data: st.DataObject
) -> None:
    scores = torch.tensor(rows)
    seen = st.integers(0, scores.shape[1])
    visible = torch.tensor([data.draw(seen) for _ in rows])
    fast, wanted = both("select_candidate_blocks", scores, visible, block_size=size, topk_blocks=k)
    assert torch.equal(fast, wanted)


def test_select_from_candidates(both: Both) -> None:
    blocks = torch.tensor([[0, 2, 5, -1], [1, 3, 4, 9]])
    scores = torch.randn(2, 16).bfloat16().float()
    scores[0, 10:] = -math.inf
    for k in (3, 16, 40):
        args = (scores, blocks, k)
        assert torch.equal(*both("select_from_candidates", *args, block_size=4))


def paged_keys(record: Record) -> tuple[RecordField, Tensor]:
    """Six shuffled pages of eight entries, and tables of two groups."""
    values, scales = ops.pack_rows(torch.randn(6, 8, 32), record)
    return RecordField(record, values, scales), torch.tensor([[5, 1, 3], [2, 0, 4]])


@pytest.mark.parametrize("record", [Record.FP4_32, Record.FP8_32, Record.BFLOAT16, Record.FLOAT32])
@pytest.mark.parametrize("req_of_row", [[0, 1], [0, 0, 0, 0, 1, 1, 1], [1, 1], [0, 0]], ids=str)
def test_index_logits(both: Both, req_of_row: list[int], record: Record) -> None:
    keys, table = paged_keys(record)
    m = len(req_of_row)
    visible = torch.randint(0, 22, (m,))
    visible[-1] = 20
    q, weights = torch.randn(m, 4, 32), torch.randn(m, 4)
    rows = (table, torch.tensor(req_of_row))
    fast, wanted = both("index_logits", q, weights, keys, *rows, visible, 22, exact_rounding=False)
    assert fast.shape == wanted.shape
    shown = torch.arange(22) < visible.unsqueeze(1)
    torch.testing.assert_close(fast[shown], wanted[shown], rtol=2e-5, atol=2e-5)
    blocks = torch.tensor([[0, 2, 5, -1], [1, 3, 4, 4]])[torch.arange(m) % 2]
    fast, wanted = both(
        "candidate_logits",
        *(q, weights, keys, *rows, blocks, visible),
        block_size=4,
        exact_rounding=False,
    )
    torch.testing.assert_close(fast, wanted, rtol=2e-5, atol=2e-5)


def test_index_logits_where_nothing_is_visible(both: Both) -> None:
    keys, table = paged_keys(Record.FP4_32)
    q, weights = torch.randn(2, 4, 32), torch.randn(2, 4)
    rows, none = torch.tensor([0, 1]), torch.tensor([0, 0])
    fast, wanted = both(
        "index_logits", q, weights, keys, table, rows, none, 0, exact_rounding=False
    )
    assert fast.shape == wanted.shape == (2, 0)


@pytest.mark.parametrize("hadamard", [False, True])
def test_prepare_index_query(both: Both, hadamard: bool) -> None:
    cos, sin = torch.rand(2, 5, 8)
    q = torch.randn(5, 4, 32)
    fast, wanted = both("prepare_index_query", q, cos, sin, hadamard=hadamard)
    # A rotated value may differ in its last bit, and so fall on the other side of a tie.
    assert (fast != wanted).float().mean() < 0.01
