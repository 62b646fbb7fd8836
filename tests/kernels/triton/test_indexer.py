"""Index queries and scores, at every edge of kernels.md 5 and 6, against their definitions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import indexer as reference
from leadline.kernels.reference.quant import round_trip_fp4_32
from leadline.kernels.triton import indexer
from tests.kernels.bounds import few_differ
from tests.kernels.reference.test_indexer import stored_keys

HEADS, WIDTH, PER_PAGE = 4, 128, 16
HALF_ULP = 2.0**-8  # of bf16, at most
FP8_SUM = 2.0**-11  # of the magnitudes of all terms: tensor cores drop 13 bits below the largest
Definition = Callable[[Tensor, Tensor, RecordField], Tensor]
EXACT = pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])


def queries(rows: int, heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """On the grid of the keys; weights of both signs."""
    q = torch.randn(rows, heads, WIDTH, device=device).bfloat16()
    weights = torch.randn(rows, heads, device=device).bfloat16()
    return round_trip_fp4_32(q), weights


def paged_keys(keys: Tensor, device: torch.device) -> tuple[RecordField, Tensor]:
    """As the cache lays them out: the values of a page, then its scales."""
    field, table = stored_keys(keys, Record.FP4_32, PER_PAGE)
    assert field.scales is not None
    data = torch.cat((field.values.flatten(1), field.scales.flatten(1)), dim=1).to(device)
    values, scales = data.split((PER_PAGE * WIDTH // 2, PER_PAGE * WIDTH // 32), dim=1)
    field = dataclasses.replace(
        field,
        values=values.unflatten(1, (PER_PAGE, -1)),
        scales=scales.unflatten(1, (PER_PAGE, -1)),
    )
    return field, table.to(device)


def score(module: Any, made: tuple[Any, ...], columns: int, *, exact: bool) -> Tensor:
    """What is undefined is -inf."""
    scores: Tensor = module.index_logits(*made, columns, exact_rounding=exact)
    hidden = torch.arange(columns, device=scores.device) >= made[-1].unsqueeze(1)
    return scores.masked_fill(hidden, -math.inf)


def check(made: tuple[Any, ...], columns: int, *, exact: bool, differing: float = 0.01) -> None:
    actual = score(indexer, made, columns, exact=exact)
    agree(actual, define(made, columns, exact=exact), *made[:3], exact=exact, differing=differing)


def define(made: tuple[Any, ...], columns: int, *, exact: bool) -> Definition:
    """``score`` by the reference, of other operands."""
    return lambda *operands: score(reference, (*operands, *made[3:]), columns, exact=exact)


def agree(
    actual: Tensor,
    define: Definition,
    q: Tensor,
    weights: Tensor,
    keys: RecordField,
    *,
    exact: bool,
    differing: float = 0.01,
) -> None:
    """Products are exact, so few scores differ, where the order of a sum moved a rounding.

    By no more than all roundings may: of the score, of each head's dot and product where these are
    rounded, and of the sums of FP8 tensor cores, which is of a dot's terms, whatever their signs.
    """
    wanted = define(q, weights, keys)
    assert actual.dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(actual == -math.inf, wanted == -math.inf)
    assert few_differ(actual, wanted, differing)
    q, weights, shown = q.double(), weights.double(), wanted > -math.inf
    unsigned = dataclasses.replace(keys, values=keys.values & 0x77)
    truth, heads, terms = (
        define(*operands)[shown]
        for operands in (
            (q, weights, keys),
            (q, weights.abs(), keys),
            (q.abs(), weights.abs(), unsigned),
        )
    )
    bound = HALF_ULP * (truth.abs() + (2 * heads if exact else 0)) + FP8_SUM * terms
    assert ((actual[shown] - truth).abs() <= bound).all()


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize(("rope", "heads"), [(32, 3), (64, 3), (64, 64)])
def test_prepared_queries_are_rotated_and_rounded(
    device: torch.device, rope: int, heads: int, hadamard: bool
) -> None:
    q = 3 * torch.randn(5, heads, WIDTH, device=device).bfloat16()
    q[1] *= 2.0 ** torch.randint(-20, 20, q[1].shape, device=device)
    q[2], q[3] = 0, math.nan
    angle = torch.rand(5, rope // 2, device=device) * 6.3
    angles = angle.cos(), angle.sin()
    wanted = reference.prepare_index_query(q, *angles, hadamard=hadamard)
    actual = indexer.prepare_index_query(q, *angles, hadamard=hadamard)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
    actual, wanted = indexer.quantize_index_query(q), round_trip_fp4_32(q)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


@EXACT
@pytest.mark.parametrize("heads", [4, 20])
def test_decoding_rows_of_every_length(device: torch.device, heads: int, exact: bool) -> None:
    """Lengths 0, 1, at the edges of pages and tiles, and wildly different ones in one batch."""
    lengths = [0, 1, 15, 16, 17, 63, 64, 65, 200]
    m = len(lengths)
    keys = paged_keys(torch.randn(m, 200, WIDTH), device)
    visible = torch.tensor(lengths, device=device)
    rows = (*keys, torch.arange(m, device=device), visible)
    check((*queries(m, heads, device), *rows), 200, exact=exact)


@EXACT
def test_prefill_rows_of_several_requests(device: torch.device, exact: bool) -> None:
    """Tiles of rows hold two requests, and padding behind the last rows, which see nothing."""
    keys = paged_keys(torch.randn(3, 150, WIDTH), device)
    request = torch.tensor([0] * 6 + [2] * 5 + [0] * 2, device=device)
    visible = torch.tensor([60, 61, 62, 63, 64, 65, 1, 2, 0, 130, 150, 0, 0], device=device)
    made = (*queries(13, HEADS, device), *keys, request, visible)
    actual = score(indexer, made, 150, exact=exact)
    q, weights, *rows = (part[:11] for part in (made[0], made[1], request, visible))
    live: tuple[Any, ...] = (q, weights, *keys, *rows)
    agree(actual[:11], define(live, 150, exact=exact), *live[:3], exact=exact)


def test_rows_of_no_request_write_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = torch.zeros(8, 40, dtype=torch.bfloat16, device=device)
    monkeypatch.setattr(indexer, "_empty_scores", lambda q, columns: buffer[: len(q), :columns])
    keys = paged_keys(torch.randn(1, 40, WIDTH), device)
    request = torch.tensor([0, 0, 0, 0, -1], device=device)
    visible = torch.tensor([10, 20, 30, 40, 0], device=device)
    score(indexer, (*queries(5, HEADS, device), *keys, request, visible), 40, exact=True)
    assert buffer[:4].any(dim=1).all()
    assert not buffer[4:].any()


def test_block_scales_may_span_many_octaves(device: torch.device) -> None:
    """Sums of FP8 tensor cores keep some 14 bits, so here more of them fall to another side."""
    blocks = WIDTH // 32
    wide = torch.randn(1, 100, blocks, 32) * 2.0 ** torch.randint(-9, 9, (1, 100, blocks, 1))
    wide[0, :5] *= 2.0 ** torch.linspace(-70, 60, blocks).round().unsqueeze(1)
    wide[0, 7], wide[0, 8, 1] = 0, 0
    keys = paged_keys(wide.flatten(2), device)
    q, weights = queries(2, HEADS, device)
    q[1, :, :32] *= 2.0**-12
    rows = (torch.zeros(2, dtype=torch.int64, device=device), torch.tensor([100, 90]).to(device))
    check((q, weights, *keys, *rows), 100, exact=True, differing=0.1)


def test_what_lies_beyond_is_not_read_into_results(device: torch.device) -> None:
    """Pages that nobody sees, the rest of the last page and the padding of a table are poisoned."""
    keys, table = paged_keys(torch.randn(2, 48, WIDTH), device)
    visible = torch.tensor([20, 3], device=device)
    made = (*queries(2, HEADS, device), keys, table, torch.arange(2, device=device), visible)
    clean = score(indexer, made, 40, exact=True)
    assert keys.scales is not None
    for request, first in enumerate(visible.tolist()):
        for j in range(first, 48):
            keys.values[table[request, j // PER_PAGE], j % PER_PAGE] = 255
            keys.scales[table[request, j // PER_PAGE], j % PER_PAGE] = 255
    table[1, 1:] = 0
    assert torch.equal(score(indexer, made, 40, exact=True), clean)


def test_broken_rows_and_keys_stay_alone(device: torch.device) -> None:
    keys, table = paged_keys(torch.randn(1, 40, WIDTH), device)
    q, weights = queries(3, HEADS, device)
    rows = (torch.zeros(3, dtype=torch.int64, device=device), torch.full((3,), 40, device=device))
    clean = score(indexer, (q, weights, keys, table, *rows), 40, exact=True)
    q[1] = math.nan
    assert keys.scales is not None
    keys.scales[table[0, 1], 3] = 255
    actual = score(indexer, (q, weights, keys, table, *rows), 40, exact=True)
    assert bool(actual[1].isnan().all())
    assert bool(actual[:, PER_PAGE + 3].isnan().all())
    kept = torch.arange(40, device=device) != PER_PAGE + 3
    assert torch.equal(actual[::2, kept], clean[::2, kept])


def test_no_rows_and_no_entries(device: torch.device) -> None:
    keys, table = paged_keys(torch.randn(1, 16, WIDTH), device)
    for rows, columns in ((0, 16), (2, 0)):
        none = torch.zeros(rows, dtype=torch.int64, device=device)
        made = (*queries(rows, HEADS, device), keys, table, none, none)
        assert score(indexer, made, columns, exact=True).shape == (rows, columns)


def test_plain_keys_run_by_reference(device: torch.device) -> None:
    field, table = stored_keys(torch.randn(1, 20, WIDTH), Record.BFLOAT16, PER_PAGE)
    field = RecordField(field.record, field.values.to(device), None)
    none = torch.zeros(2, dtype=torch.int64, device=device)
    q, weights = queries(2, HEADS, device)
    made = (q, weights, field, table.to(device), none, none + 20)
    actual, wanted = (score(module, made, 20, exact=True) for module in (indexer, reference))
    assert torch.equal(actual, wanted)
    blocks = torch.tensor([[0, 2], [1, -1]], device=device)
    candidates = (q, weights, field, table.to(device), none, blocks, none + 20)
    actual, wanted = (
        module.candidate_logits(*candidates, block_size=8, exact_rounding=True)
        for module in (indexer, reference)
    )
    assert torch.equal(actual, wanted)


@EXACT
@pytest.mark.parametrize("kept", [1, 5, 30])
def test_candidates_equal_dense_scores(device: torch.device, kept: int, exact: bool) -> None:
    """One block, some, and more than there are; the newest block is partly visible."""
    keys = paged_keys(torch.randn(4, 200, WIDTH), device)
    visible = torch.tensor([200, 0, 99, 5], device=device)
    paged = (*queries(4, HEADS, device), *keys, torch.arange(4, device=device))
    dense = score(indexer, (*paged, visible), 200, exact=exact)
    blocks = reference.select_candidate_blocks(dense, visible, block_size=8, topk_blocks=kept)
    options: dict[str, Any] = {"block_size": 8, "exact_rounding": exact}
    scores = indexer.candidate_logits(*paged, blocks, visible, **options)
    rest: tuple[Any, ...] = (*paged[3:], blocks, visible)
    agree(
        scores,
        lambda *operands: reference.candidate_logits(*operands, *rest, **options),
        *paged[:3],
        exact=exact,
    )
    entries = (blocks.unsqueeze(2) * 8 + torch.arange(8, device=device)).flatten(1)
    there = (entries >= 0) & (entries < visible.unsqueeze(1))
    wanted = dense.gather(1, entries.clamp(0, 199)).masked_fill(~there, -math.inf)
    assert torch.equal(scores, wanted)
