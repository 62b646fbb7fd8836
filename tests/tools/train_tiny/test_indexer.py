"""Selections of the trainer's indexers."""

from __future__ import annotations

import torch

from leadline.config.presets import TINY_22M
from leadline.tools.train_tiny.indexer import choose
from leadline.tools.train_tiny.rows import Rows
from tests.tools.train_tiny.packed import packed_rows


def test_the_fast_choice_differs_from_the_exact_one_in_ties_only() -> None:
    batch = packed_rows(2, 1024)
    visible = Rows(batch, TINY_22M, 0).entry_mask(1)
    scores = torch.randn(visible.shape, dtype=torch.bfloat16)
    exact, exact_candidates = choose(scores, visible, None, 64, 32, 8, False)
    fast, fast_candidates = choose(scores, visible, None, 64, 32, 8, True)
    assert exact_candidates is not None
    assert fast_candidates is not None
    assert not (exact & ~fast).any()
    assert not (exact_candidates & ~fast_candidates).any()
    lowest = scores.masked_fill(~exact, torch.inf).amin(-1, keepdim=True)
    assert (scores == lowest).logical_or(~(fast & ~exact)).all()
