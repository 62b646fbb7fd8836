"""Selections, at every edge of kernels.md 7, against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.core.errors import ConfigError
from leadline.kernels.reference import indexer as reference
from leadline.kernels.triton import selection2 as selection

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of some hundred scores need every level of the tournament."""
    monkeypatch.setattr(selection, "_LONGEST", 32)
    monkeypatch.setattr(selection, "_TILE", 256)


def check(scores: Tensor, k: int) -> None:
    actual = selection.select_top_k(scores, k)
    assert actual.tolist() == reference.select_top_k(scores, k).tolist()


@DTYPES
@pytest.mark.parametrize("columns", [1, 2, 32, 33, 700])
@pytest.mark.parametrize("k", [1, 4])
def test_every_length(
    device: torch.device, small: None, columns: int, k: int, dtype: torch.dtype
) -> None:
    check(torch.randn(3, columns, device=device, dtype=dtype), k)


@DTYPES
@pytest.mark.parametrize("columns", [20, 300])
def test_fewer_valid_than_k_leaves_minus_one_behind(
    device: torch.device, small: None, columns: int, dtype: torch.dtype
) -> None:
    scores = torch.full((5, columns), -math.inf, device=device, dtype=dtype)
    for row, valid in zip(scores, (0, 1, 3, 4, 5), strict=True):
        row[torch.randperm(columns, device=device)[:valid]] = torch.randn(
            valid, device=device, dtype=dtype
        )
    check(scores, 4)


SHAPES = {
    "all_equal": lambda n: torch.full((n,), -2.5),
    "ascending": lambda n: torch.arange(n) / 16,
    "descending": lambda n: -torch.arange(n) / 16,
    "sawtooth": lambda n: (torch.arange(n) % 7).float(),
    "signed_zeros": lambda n: torch.where(torch.arange(n) % 3 == 0, -0.0, 0.0),
    "all_minus_infinite": lambda n: torch.full((n,), -math.inf),
    "all_nan": lambda n: torch.full((n,), math.nan),
    "infinite": lambda n: torch.where(torch.arange(n) % 5 == 0, math.inf, 1.0),
    "some_nan": lambda n: torch.where(torch.arange(n) % 2 == 0, math.nan, torch.arange(n) * 1.0),
    "tiny": lambda n: torch.tensor([2e-38, -2e-38, 0.0, 3e-38]).repeat(n)[:n],
}


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("columns", [30, 600])
def test_worst_cases(
    device: torch.device, small: None, columns: int, shape: str, dtype: torch.dtype
) -> None:
    """Beside a row of noise, which they do not touch."""
    rows = torch.stack((SHAPES[shape](columns), torch.randn(columns))).to(device, dtype)
    check(rows, 4)


def test_ties_at_every_level(device: torch.device, small: None) -> None:
    for k in (1, 2, 4):
        check(torch.randint(3, (4, 500), device=device).bfloat16(), k)


@pytest.mark.parametrize("k", [511, 512, 513, 2048])
def test_official_widths(device: torch.device, k: int) -> None:
    scores = torch.randn(1, 20000, device=device).bfloat16()
    scores[0, 9000:10000] = -math.inf
    check(scores, k)


def test_rows_may_have_gaps(device: torch.device, small: None) -> None:
    scores = torch.randn(4, 301, device=device).bfloat16()[::2, :257]
    check(scores, 4)


def test_too_many_of_too_long_a_row(device: torch.device, small: None) -> None:
    scores = torch.empty(1, 2100, device=device)
    with pytest.raises(ConfigError, match="at most 2048 are possible"):
        selection.select_top_k(scores, 4)


def test_nothing_to_select_from(device: torch.device) -> None:
    assert selection.select_top_k(torch.empty(0, 9, device=device), 4).shape == (0, 4)
    assert selection.select_top_k(torch.empty(3, 0, device=device), 4).shape == (3, 0)


@pytest.mark.parametrize("columns", [4, 37, 500])
def test_from_candidates(device: torch.device, small: None, columns: int) -> None:
    blocks = torch.randperm(3 * columns, device=device)[: 2 * columns].view(2, columns)
    blocks = blocks.sort().values
    scores = torch.randint(9, (2, 4 * columns), device=device).bfloat16()
    blocks[1, columns // 2 :], scores[1, 2 * columns :] = -1, -math.inf
    for k in (1, 4, 4 * columns) if columns == 4 else (1, 4):
        actual = selection.select_from_candidates(scores, blocks, k, block_size=4)
        wanted = reference.select_from_candidates(scores, blocks, k, block_size=4)
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("topk_blocks", [1, 4])
@pytest.mark.parametrize("columns", [1, 8, 9, 250, 1000])
def test_candidate_blocks(
    device: torch.device, small: None, columns: int, topk_blocks: int
) -> None:
    """The newest block is kept, whole or not; nothing where nothing is visible."""
    visible = torch.tensor([columns, columns // 2, 0, 1, columns], device=device)
    scores = torch.randint(-5, 5, (5, columns), device=device).bfloat16()
    scores[4] = math.nan
    hidden = torch.arange(columns, device=device) >= visible.unsqueeze(1)
    scores.masked_fill_(hidden, -math.inf)
    size = {"block_size": 8, "topk_blocks": topk_blocks}
    actual = selection.select_candidate_blocks(scores, visible, **size)
    assert torch.equal(actual, reference.select_candidate_blocks(scores, visible, **size))
