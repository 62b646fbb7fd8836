"""What indexers learn from: which rows, and how much of their attention."""

from __future__ import annotations

import torch

from leadline.tools.train_tiny.batch import Batch
from leadline.tools.train_tiny.indexer import add_attention
from leadline.tools.train_tiny.recipes import REHEARSAL_CONFIG
from leadline.tools.train_tiny.rows import Rows, draw_probes


def batch(rows: int = 2, length: int = 256) -> Batch:
    ids = torch.randint(3, 400, (rows, length))
    return Batch(ids, torch.zeros_like(ids), torch.zeros(rows, length))


def test_probed_rows_are_those_that_predict_what_is_learnt_among_many_entries() -> None:
    torch.manual_seed(0)
    weighted = batch()
    weighted.weights[0, [20, 200]] = 100.0
    weighted.weights[1, 150] = 100.0
    drawn = torch.stack([draw_probes(weighted, 2, index_topk=64) for _ in range(50)])
    shares = [(drawn[:, row] == at - 1).any(-1).float().mean() for row, at in ((0, 200), (1, 150))]
    assert min(shares) > 0.8
    # Where there are few entries, none can be chosen wrongly.
    assert (drawn[:, 0] == 19).any(-1).float().mean() < 0.75 * shares[0]


def test_each_row_is_probed_once_and_all_of_them_where_there_are_few() -> None:
    rows = Rows(batch(length=64), REHEARSAL_CONFIG, probes=100)
    assert torch.equal(rows.probe.sort(-1).values, torch.arange(64).expand(2, 64))


def test_masks_and_values_of_probed_rows_are_those_of_all_rows() -> None:
    two_documents = batch()
    two_documents.first[1, 128:] = 128
    rows = Rows(two_documents, REHEARSAL_CONFIG, probes=20)
    for ratio in (1, 2):
        assert torch.equal(rows.entry_mask(ratio, probed=True), rows.probed(rows.entry_mask(ratio)))
    ids = rows.probed(two_documents.ids)
    assert torch.equal(ids, two_documents.ids.gather(1, rows.probe))


def test_what_teaches_an_indexer_does_not_depend_on_what_it_chose() -> None:
    q, entries = torch.randn(2, 5, 3, 8), torch.randn(2, 30, 8)
    visible = torch.rand(2, 5, 30) < 0.8
    chosen = visible & (torch.rand(2, 5, 30) < 0.5)
    window = torch.randn(2, 5, 3)  # log of what the window and the sink add
    scores = torch.einsum("bnhd,bkd->bnhk", q, entries) * 8**-0.5

    def total(mask: torch.Tensor) -> torch.Tensor:
        seen = scores.masked_fill(~mask.unsqueeze(2), -torch.inf)
        return torch.logaddexp(seen.logsumexp(-1), window)

    nothing = torch.zeros(2, 5, 30)
    dense = add_attention(q, entries, total(visible), visible, None, nothing)
    sparse = add_attention(q, entries, total(chosen), visible, chosen, nothing)
    torch.testing.assert_close(sparse, dense)
    whole = (scores - total(visible).unsqueeze(-1)).exp().masked_fill(~visible.unsqueeze(2), 0)
    torch.testing.assert_close(dense, whole.sum(2))
