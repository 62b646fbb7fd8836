"""Index scores against the golden units, selection against its definition in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import indexer, kv_store
from leadline.kernels.reference.hadamard import hadamard
from leadline.kernels.reference.quant import round_trip_fp4_32
from leadline.kernels.reference.rope import rotate

# Few different scores, so that ties are frequent; -0.0 equals 0.0.
SCORES = st.sampled_from([math.nan, math.inf, -math.inf, -1.5, -0.0, 0.0, 0.5, 0.5, 2.0])


def score_rows(max_entries: int) -> st.SearchStrategy[list[list[float]]]:
    """One to four rows of equal length."""
    return st.integers(1, max_entries).flatmap(
        lambda n: st.lists(st.lists(SCORES, min_size=n, max_size=n), min_size=1, max_size=4)
    )


def best(scores: list[float], k: int) -> list[int]:
    """Positions of the k best: larger score, then larger position; NaN and -inf never."""
    valid = [(s, i) for i, s in enumerate(scores) if s > -math.inf]  # NaN compares as False
    return sorted(i for _, i in sorted(valid, reverse=True)[:k])


def best_blocks(scores: list[float], visible: int, size: int, k: int) -> list[int]:
    """The k best aligned blocks, the newest visible entry's block before all others."""
    clean = [-math.inf if math.isnan(s) else s for s in scores]
    maxima = [max(clean[i : i + size]) for i in range(0, len(clean), size)]
    order = best(maxima, len(maxima))
    order.sort(key=lambda b: (maxima[b], b), reverse=True)
    if visible:
        newest = (visible - 1) // size
        order = [newest, *(b for b in order if b != newest)]
    return sorted(order[:k])


class TestTopK:
    @given(score_rows(max_entries=24), st.integers(1, 26))
    def test_equals_its_definition(self, scores: list[list[float]], k: int) -> None:
        selected = indexer.select_top_k(torch.tensor(scores), k)
        width = min(k, len(scores[0]))
        wanted = [best(row, k) for row in scores]
        assert selected.tolist() == [row + [-1] * (width - len(row)) for row in wanted]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("k", [1, 511, 512, 513])
    def test_many_ties_among_many_entries(self, k: int, dtype: torch.dtype) -> None:
        """Scores rounded to bf16, as the index makes them: runs of ties at every threshold."""
        scores = torch.randn(3, 2000).bfloat16().to(dtype)
        scores[0] = scores[0].sort().values
        scores[1] = scores[1].sort(descending=True).values
        selected = indexer.select_top_k(scores, k)
        assert selected.tolist() == [best(row, k) for row in scores.tolist()]

    @pytest.mark.parametrize("valid", [0, 1, 3, 4, 5])
    def test_fewer_valid_than_k_leaves_minus_one_behind(self, valid: int) -> None:
        scores = torch.full((1, 8), -math.inf)
        scores[0, :valid] = 1.0
        chosen = [*range(max(0, valid - 4), valid)]
        assert indexer.select_top_k(scores, 4).tolist() == [chosen + [-1] * (4 - len(chosen))]

    def test_all_equal_takes_the_last(self) -> None:
        assert indexer.select_top_k(torch.zeros(1, 9), 4).tolist() == [[5, 6, 7, 8]]

    def test_no_entries_give_no_columns(self) -> None:
        assert indexer.select_top_k(torch.empty(3, 0), 4).shape == (3, 0)

    @given(score_rows(max_entries=12), st.integers(1, 12))
    def test_mask_and_positions_agree(self, scores: list[list[float]], k: int) -> None:
        rows = torch.tensor(scores)
        mask, selected = indexer.top_k_mask(rows, k), indexer.select_top_k(rows, k)
        positions = [[i for i in row if i >= 0] for row in selected.tolist()]
        assert [torch.where(row)[0].tolist() for row in mask] == positions


class TestCandidates:
    @given(score_rows(max_entries=30), st.integers(1, 5), st.integers(1, 8), st.data())
    def test_equals_its_definition(
        self, scores: list[list[float]], size: int, k: int, data: st.DataObject
    ) -> None:
        count = len(scores[0])
        visible = [data.draw(st.integers(0, count)) for _ in scores]
        scores = [
            row[:n] + [-math.inf] * (count - n) for row, n in zip(scores, visible, strict=True)
        ]
        kept = indexer.select_candidate_blocks(
            torch.tensor(scores), torch.tensor(visible), block_size=size, topk_blocks=k
        )
        width = min(k, -(-count // size))
        wanted = [best_blocks(r, n, size, k) for r, n in zip(scores, visible, strict=True)]
        assert kept.tolist() == [row + [-1] * (width - len(row)) for row in wanted]

    def test_newest_block_is_kept_whatever_its_score(self) -> None:
        scores = torch.tensor([[9.0, 9.0, 8.0, 8.0, -5.0, -math.inf]])
        kept = indexer.select_candidate_blocks(
            scores, torch.tensor([5]), block_size=2, topk_blocks=2
        )
        assert kept.tolist() == [[0, 2]]

    def test_nothing_visible_gives_no_candidates(self) -> None:
        scores = torch.full((1, 6), -math.inf)
        kept = indexer.select_candidate_blocks(
            scores, torch.tensor([0]), block_size=2, topk_blocks=2
        )
        assert kept.tolist() == [[-1, -1]]


def stored_keys(keys: Tensor, record: Record, entries_per_page: int) -> tuple[RecordField, Tensor]:
    """Keys ``[requests, N, di]`` on shuffled pages, and the page table; page 0 is the null page."""
    requests, count, dim = keys.shape
    per_request = -(-count // entries_per_page)
    num_pages = 1 + requests * per_request
    table = 1 + torch.randperm(num_pages - 1).view(requests, per_request)
    values, scales = kv_store.pack_rows(torch.zeros(num_pages, entries_per_page, dim), record)
    field = RecordField(record, values, scales)
    entry = torch.arange(count)
    for request in range(requests):
        page, row = table[request, entry // entries_per_page], entry % entries_per_page
        packed = kv_store.pack_rows(keys[request], record)
        kv_store.store_rows(field, page, row, *packed)
    return field, table


@pytest.mark.parametrize("record", [Record.FP4_32, Record.BFLOAT16])
@pytest.mark.parametrize(("layer", "source", "ratio"), [(2, 2, 2), (4, 4, 1), (6, 4, 1)])
def test_golden_scores(
    units: dict[str, Tensor], layer: int, source: int, ratio: int, record: Record
) -> None:
    """The last 16 queries of 300 tokens; the file's keys are on the MXFP4 grid already."""
    keys = units[f"unit.indexer.keys.{source}"].unsqueeze(0)
    field, table = stored_keys(keys, record, 256 // ratio)
    scores = indexer.index_logits(
        units[f"unit.indexer.{layer}.index_q"],
        units[f"unit.indexer.{layer}.index_w"],
        field,
        table,
        torch.zeros(16, dtype=torch.int64),
        torch.arange(285, 301) // ratio,
        300 // ratio,
        exact_rounding=True,
    )
    assert torch.equal(scores, units[f"unit.indexer.{layer}.scores"])


class TestLogits:
    @staticmethod
    def make(record: Record = Record.FLOAT32) -> tuple[Tensor, Tensor, RecordField, Tensor]:
        """Four rows of three requests, two heads, 11 keys a request on pages of four."""
        q, weights = torch.randn(4, 2, 32).double(), torch.randn(4, 2).double()
        return q, weights, *stored_keys(torch.randn(3, 11, 32), record, 4)

    @staticmethod
    def score(
        made: tuple[Tensor, Tensor, RecordField, Tensor], rows: list[int], visible: list[int]
    ) -> Tensor:
        q, weights, keys, table = made
        seen = torch.tensor(visible)
        return indexer.index_logits(
            *(q, weights, keys, table, torch.tensor(rows), seen, max(visible)),
            exact_rounding=True,
        )

    @pytest.mark.parametrize("visible", [[11, 3, 0, 7], [0, 0, 0, 0], [1, 1, 1, 1]], ids=str)
    def test_equals_a_loop_over_heads(self, visible: list[int]) -> None:
        q, weights, keys, table = made = self.make()
        groups = [0, 1, 1, 2]
        scores = self.score(made, groups, visible)
        wanted = torch.full((4, max(visible)), -math.inf, dtype=torch.float64)
        for row, (group, count) in enumerate(zip(groups, visible, strict=True)):
            for j in range(count):
                key = keys.values[table[group, j // 4], j % 4].double()
                wanted[row, j] = sum(
                    max(float(q[row, head] @ key), 0.0) * float(weights[row, head])
                    for head in range(2)
                )
        torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-12)

    def test_groups_without_rows_are_skipped(self) -> None:
        q, weights, keys, table = self.make()
        scores = self.score((q, weights, keys, table), [1, 1, 1, 1], [2, 3, 4, 5])
        alone = self.score((q, weights, keys, table[1:2]), [0, 0, 0, 0], [2, 3, 4, 5])
        torch.testing.assert_close(scores, alone, rtol=0, atol=1e-12)

    def test_entries_out_of_sight_may_be_nan(self) -> None:
        made = self.make()
        _, _, keys, table = made
        clean = self.score(made, [0, 1, 1, 2], [4, 9, 9, 1])
        for group, first in enumerate([4, 9, 1]):
            for j in range(first, 12):
                keys.values[table[group, j // 4], j % 4] = math.nan
        keys.values[0] = math.nan
        assert torch.equal(self.score(made, [0, 1, 1, 2], [4, 9, 9, 1]), clean)

    def test_blocks_of_rows_and_groups_change_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = self.make()
        whole = self.score(made, [0, 1, 1, 2], [4, 9, 10, 11])
        monkeypatch.setattr("leadline.kernels.reference.blocks._ELEMENTS", {"cpu": 1})
        blocks = self.score(made, [0, 1, 1, 2], [4, 9, 10, 11])
        torch.testing.assert_close(blocks, whole, rtol=0, atol=1e-12)

    def test_rounding_is_optional_and_in_bf16_only(self) -> None:
        q, weights, keys, table = self.make(Record.FP4_32)
        args = (keys, table, torch.tensor([0, 1, 1, 2]), torch.full((4,), 11), 11)
        scores = [
            indexer.index_logits(q.to(dtype), weights.to(dtype), *args, exact_rounding=exact)
            for dtype in (torch.float32, torch.bfloat16)
            for exact in (True, False)
        ]
        assert torch.equal(scores[0], scores[1])
        assert not torch.equal(scores[2], scores[3])
        # Of a dot, its product and the sum, each by 2^-8 at most of what does not cancel.
        heads = indexer.index_logits(q.float(), weights.abs().float(), *args, exact_rounding=False)
        assert ((scores[2] - scores[3]).abs() <= 2**-6 * heads).all()


class TestCandidateScores:
    """Scoring candidates is scoring everything, masking the others and selecting."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("kept", [1, 3, 8])
    def test_equals_masked_dense_scores(self, dtype: torch.dtype, kept: int) -> None:
        keys, table = stored_keys(torch.randn(3, 30, 32), Record.FP4_32, 8)
        q, weights = torch.randn(4, 2, 32).to(dtype), torch.randn(4, 2).to(dtype)
        rows, visible = torch.tensor([0, 1, 1, 2]), torch.tensor([30, 0, 9, 23])
        paged = (q, weights, keys, table, rows)
        dense = indexer.index_logits(*paged, visible, 30, exact_rounding=True)
        blocks = indexer.select_candidate_blocks(dense, visible, block_size=4, topk_blocks=kept)
        scores = indexer.candidate_logits(
            *paged, blocks, visible, block_size=4, exact_rounding=True
        )
        chosen = indexer.select_from_candidates(scores, blocks, 5, block_size=4)
        allowed = (torch.arange(30) // 4).view(1, 1, -1) == blocks.unsqueeze(2)
        masked = dense.masked_fill(~allowed.any(1), -math.inf)
        wanted = indexer.select_top_k(masked, 5)[:, : chosen.shape[1]]
        assert torch.equal(chosen, wanted)

    def test_ties_take_the_larger_entry(self) -> None:
        blocks = torch.tensor([[1, 4, 6, -1]])
        scores = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0, 1.0, -math.inf, -math.inf]])
        chosen = indexer.select_from_candidates(scores, blocks, 3, block_size=2)
        assert chosen.tolist() == [[8, 9, 13]]

    def test_fewer_valid_than_k_leaves_minus_one_behind(self) -> None:
        scores = torch.tensor([[2.0, -math.inf, -math.inf, -math.inf]])
        chosen = indexer.select_from_candidates(scores, torch.tensor([[3, -1]]), 3, block_size=2)
        assert chosen.tolist() == [[6, -1, -1]]


def test_entry_address_follows_the_page_table() -> None:
    table = torch.tensor([[5, 2, 0], [1, 3, 4]])
    entries = torch.tensor([[0, 3, 4, 7], [4, 8, 11, 0]])
    page, row = indexer.entry_address(entries, table, 4)
    assert page.tolist() == [[5, 5, 2, 2], [3, 4, 4, 1]]
    assert row.tolist() == [[0, 3, 0, 3], [0, 0, 3, 0]]


def test_queries_are_transformed_between_rotation_and_rounding() -> None:
    q = torch.randn(3, 2, 32).bfloat16()
    angles = torch.randn(3, 4)
    cos, sin = angles.cos(), angles.sin()
    wanted = round_trip_fp4_32(hadamard(rotate(q, cos, sin)))
    assert torch.equal(indexer.prepare_index_query(q, cos, sin, hadamard=True), wanted)
