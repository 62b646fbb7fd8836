"""Ops over rows of activations: sums in another order, everything else as in the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.cache.pool import make_field
from leadline.kernels import ops
from leadline.kernels.packed import LinearWeight, WeightFormat
from leadline.kernels.records import Record
from leadline.kernels.reference.quant import quantize_fp8_32, round_trip_fp8
from leadline.kernels.registry import REFERENCE, Kernels
from tests.kernels.bounds import FLOAT32_SUM, Bounded, expert_outputs
from tests.kernels.cpu.conftest import Both

LIMIT = 2.0
ROWS = (0, 1, 3, 33)
# A sum of n terms in another order moves by some n half-units in the last place of its largest.
SUM = 2.0**-20  # of the magnitudes of a few terms, which may cancel
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}


def activations(*shape: int) -> Tensor:
    """Row norms in the hundreds and a channel far above the rest, as trained streams have."""
    x = 10 * torch.randn(shape)
    x[..., 3] *= 100
    return x


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("eps", [1e-20, 1e-6])
def test_rms_norm(both: Both, rows: int, eps: float) -> None:
    x = activations(rows, 96)
    torch.testing.assert_close(*both("rms_norm", x, torch.randn(96), eps=eps), **CLOSE)


@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (5, 48), (0, 2, 32), (7, 3, 32)], ids=str)
def test_rotate(both: Both, shape: tuple[int, ...]) -> None:
    angles = 1e4 * torch.randn(shape[0], 8)
    torch.testing.assert_close(
        *both("rotate", torch.randn(shape), angles.cos(), angles.sin()), **CLOSE
    )


@pytest.mark.parametrize("rows", ROWS[1:])
@pytest.mark.parametrize("rounds", [1, 20])
def test_mhc_coefficients(both: Both, rows: int, rounds: int) -> None:
    fast, wanted = both(
        "mhc_coefficients",
        activations(rows, 4, 64),
        torch.randn(24, 256) / 16,
        torch.randn(24),
        torch.tensor([0.5, 2.0, 3.0]),
        sinkhorn_iters=rounds,
        hc_eps=1e-6,
        eps=1e-20,
    )
    for got, want in zip(fast, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("rows", ROWS)
def test_mhc_collapse_and_expand(both: Both, rows: int) -> None:
    streams = activations(rows, 4, 64)
    expanded = activations(rows, 64), streams, torch.rand(rows, 4), mixing(rows)
    for name, arguments in (
        ("mhc_collapse", (streams, torch.rand(rows, 4))),
        ("mhc_expand", expanded),
    ):
        fast, wanted = both(name, *arguments)
        terms = getattr(ops, name)(*(argument.abs() for argument in arguments))
        assert ((fast - wanted).abs() <= SUM * terms).all()


@pytest.mark.parametrize("rows", ROWS)
def test_mhc_enter(both: Both, rows: int) -> None:
    streams, mix, weight = activations(rows, 4, 64), torch.rand(rows, 4), torch.randn(64)
    fast, wanted = both("mhc_enter", streams, mix, weight, eps=1e-6)
    norm = ops.mhc_collapse(streams, mix).square().mean(-1, keepdim=True).sqrt()
    terms = ops.mhc_collapse(streams.abs(), mix) / norm * weight.abs()
    assert ((fast - wanted).abs() <= SUM * terms + 2e-5 * wanted.abs()).all()


def test_mhc_enter_in_fp8(numba_kernels: Kernels) -> None:
    fp8 = torch.empty(3, 64, dtype=torch.uint8), torch.empty(3, 2, dtype=torch.uint8)
    arguments = (activations(3, 4, 64), torch.rand(3, 4), torch.rand(64))
    with numba_kernels.active():
        u = ops.mhc_enter(*arguments, eps=1e-6, fp8=fp8)
    for made, encoded in zip(fp8, quantize_fp8_32(u), strict=True):
        assert torch.equal(made, encoded)


def mixing(rows: int) -> Tensor:
    return torch.rand(rows, 4, 4).softmax(-1)


def test_streams_that_share_memory_are_read_as_they_are(both: Both) -> None:
    """The first layer's streams are one embedding, expanded."""
    streams = torch.randn(3, 1, 64).expand(-1, 4, -1)
    torch.testing.assert_close(*both("mhc_collapse", streams, torch.rand(3, 4)), **CLOSE)


def test_a_fused_op_runs_by_the_parts_that_the_backend_has(numba_kernels: Kernels) -> None:
    y, streams, comb = torch.randn(3, 64), torch.randn(3, 4, 64), mixing(3)
    post, mix, weight = torch.rand(3, 4), torch.rand(3, 4), torch.rand(64)
    with numba_kernels.active():
        expanded, u = ops.mhc_seam(y, streams, post, comb, mix, weight, eps=1e-6)
        assert torch.equal(expanded, ops.mhc_expand(y, streams, post, comb))
        collapsed = ops.mhc_collapse(expanded, mix)
        assert torch.equal(u, ops.rms_norm(collapsed, weight, eps=1e-6))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("per_row", [1, 3])
def test_route(both: Both, rows: int, per_row: int) -> None:
    (ids, weights), (wanted_ids, wanted) = both(
        "route",
        torch.randn(rows, 64),
        torch.randn(8, 64),
        torch.randn(8),
        num_experts_per_tok=per_row,
        scale=1.5,
    )
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, **CLOSE)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("per_row", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_hash_route(both: Both, rows: int, per_row: int, dtype: torch.dtype) -> None:
    table = torch.stack([torch.randperm(8)[:per_row] for _ in range(50)]).to(dtype)
    groups = torch.zeros(rows, dtype=torch.int64)
    groups[1:2] = -1
    (ids, weights), (wanted_ids, wanted) = both(
        "hash_route",
        *(torch.randn(rows, 64), torch.randn(8, 64), table, torch.randint(50, (rows,)), groups),
        scale=1.5,
    )
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, **CLOSE)


def test_rows_of_images_choose_with_their_own_bias(both: Both) -> None:
    images = torch.arange(33) % 3 == 1
    (ids, weights), (wanted_ids, wanted) = both(
        "route",
        *(torch.randn(33, 64), torch.randn(8, 64), torch.randn(8), None, images, torch.randn(8)),
        num_experts_per_tok=3,
        scale=1.5,
    )
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, **CLOSE)


def test_padding_chooses_no_expert(both: Both) -> None:
    (ids, _), (wanted, _) = both(
        "route",
        *(torch.randn(3, 64), torch.randn(8, 64), torch.randn(8), torch.tensor([0, -1, 2])),
        num_experts_per_tok=2,
        scale=1.5,
    )
    assert torch.equal(ids, wanted)
    assert ids[1].tolist() == [-1, -1]


def test_plan_window(both: Both) -> None:
    """Groups that fit their ring, and do not; without rows; floors above rows; and padding."""
    counts = torch.tensor([1, 25, 26, 0, 40])
    start = torch.tensor([7, 0, 33, 5, 60])
    group = torch.arange(5).repeat_interleave(counts)
    q_off = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    pos = start[group] + torch.arange(len(group)) - q_off[group]
    padding = torch.zeros(2, dtype=torch.int64)
    fast, wanted = both(
        "plan_window",
        *(torch.cat((pos, padding)), torch.cat((group, padding - 1)), q_off, start + counts),
        *(torch.tensor([3, 1, 8, 2, 5]), torch.tensor([2, 9, 30, 0, 66])),
        window=8,
        ring=32,
        staging=9,
    )
    assert torch.equal(fast[0], wanted[0])
    assert torch.equal(fast[1][:-2], wanted[1][:-2])
    assert torch.equal(fast[2], wanted[2])
    assert torch.equal(fast[3][:-2], wanted[3][:-2])
    assert torch.equal(fast[4], wanted[4])


@pytest.mark.parametrize("record", [Record.FP8_32, Record.FP8_64, Record.BFLOAT16, Record.FLOAT32])
@pytest.mark.parametrize("rank", [0, 32])
def test_rows_are_normalised_rotated_and_stored(
    numba_kernels: Kernels, record: Record, rank: int
) -> None:
    """Alone, or beside a query; rows without an address nowhere."""
    down, weights = activations(5, rank + 96), torch.randn(rank + 96)
    angles = 1e4 * torch.randn(5, 16)
    place = (torch.tensor([2, -1, 0, 2, 1]), torch.tensor([1, 0, 2, 0, 2]))
    made = []
    for kernels in (numba_kernels, REFERENCE):
        field = make_field(record, 3, 3, 96, "cpu", 32)
        rest = (weights[rank:], angles.cos(), angles.sin(), field, *place)
        with kernels.active():
            if rank:
                made.append(ops.norm_query_store_window(down, weights[:rank], *rest, eps=1e-6))
            else:
                ops.norm_rotate_store(down, *rest, eps=1e-6)
        made.append(field.values)
        made += [] if field.scales is None else [field.scales]
    half = len(made) // 2
    for fast, wanted in zip(made[:half], made[half:], strict=True):
        if fast.dtype == torch.uint8:
            assert (fast != wanted).float().mean() < 0.01
        else:
            tolerance = 2**-7 if fast.dtype is torch.bfloat16 else 2e-5
            torch.testing.assert_close(fast, wanted, rtol=tolerance, atol=2e-6)


def test_route_of_large_scores_and_of_a_broken_row(both: Both) -> None:
    """Softplus is the identity far out; a row of NaN has places, and NaN for weights."""
    x = torch.tensor([30.0, 1.0, -30.0, torch.nan]).unsqueeze(1).expand(-1, 64)
    gate = torch.rand(8, 64)
    (ids, weights), (_, wanted) = both(
        "route", x, gate, torch.zeros(8), num_experts_per_tok=2, scale=1.5
    )
    torch.testing.assert_close(weights, wanted, equal_nan=True, **CLOSE)
    assert ids.min() >= 0
    assert ids.max() < 8


FORMATS = {"packed": WeightFormat.MXFP4, "plain": WeightFormat.PLAIN}


@pytest.mark.parametrize("rows", [*ROWS[1:], 100])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("input_block", "row_scales"), [(32, False), (128, False), (32, True)], ids=str
)
def test_routed_experts(
    both: Both, rows: int, format: str, input_block: int, row_scales: bool
) -> None:
    """Few rows an expert and many; one expert gets none."""
    experts, dim, width = 6, 192, 160
    scores = torch.rand(rows, experts)
    scores[:, 2] = -1
    ids = scores.topk(3, dim=-1).indices.sort(-1).values
    x = torch.randn(rows, dim) * torch.tensor([1.0, 2**-12]).repeat_interleave(dim // 2)
    w13 = LinearWeight(torch.randn(experts, 2 * width, dim) / 8, FORMATS[format], input_block)
    w2 = LinearWeight(torch.randn(experts, dim, width) / 8, FORMATS[format], input_block)
    arguments = (x, ids, torch.rand(rows, 3), w13, w2)
    wanted = expert_bounds(*arguments, input_block=dim if row_scales else input_block)
    for actual in both("routed_experts", *arguments, limit=LIMIT, row_scales=row_scales):
        assert wanted.contains(actual)


def test_routed_experts_beside_the_shared_one(both: Both) -> None:
    """Of two choices one is masked, or both are."""
    ids = torch.tensor([[-1, 2], [-1, -1], [0, 1]])
    fast, wanted = both(
        "routed_experts",
        torch.randn(3, 64),
        ids,
        torch.rand(3, 2),
        LinearWeight(torch.randn(3, 64, 64) / 4, WeightFormat.PLAIN),
        LinearWeight(torch.randn(3, 64, 32) / 4, WeightFormat.PLAIN),
        limit=2.0,
        shared=lambda: torch.ones(3, 64),
    )
    torch.testing.assert_close(fast, wanted, **CLOSE)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("input_block", [32, 128])
def test_shared_expert(both: Both, rows: int, format: str, input_block: int) -> None:
    x = torch.randn(rows, 192)
    w13 = LinearWeight(torch.randn(320, 192) / 8, FORMATS[format], input_block)
    w2 = LinearWeight(torch.randn(192, 160) / 8, FORMATS[format], input_block)
    stacks = (dataclasses.replace(w, dense=w.dense.unsqueeze(0)) for w in (w13, w2))
    only = torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1)
    wanted = expert_bounds(x, *only, *stacks, input_block=input_block)
    for actual in both("shared_expert", x, w13, w2, limit=LIMIT):
        assert wanted.contains(actual)


def expert_bounds(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: LinearWeight,
    w2: LinearWeight,
    *,
    input_block: int,
) -> Bounded:
    """Of the definition in float32."""

    def kept(x: Tensor) -> Tensor:
        return round_trip_fp8(x, input_block) if w13.quantizes_input else x

    return expert_outputs(
        *(kept(x), ids, weights, w13.dense.double(), w2.dense.double()),
        limit=LIMIT,
        activation=Tensor.float,
        kept=kept,
        sum_error=FLOAT32_SUM,
    )


@pytest.mark.parametrize("rows", ROWS)
def test_engram_inject(both: Both, rows: int) -> None:
    live = torch.rand(rows) < 0.7
    streams = activations(rows, 4, 64)
    kv = torch.randn(rows, 320)
    kv[:1] = 0  # a gate of half
    weights = torch.randn(2, 4, 64)
    fast, wanted = both("engram_inject", streams, kv, *weights, live, eps=1e-20)
    torch.testing.assert_close(fast, wanted, **CLOSE)
    assert torch.equal(fast[~live], streams[~live])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_take_the_reference(both: Both, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 64).to(dtype), torch.randn(64)
    fast, wanted = both("rms_norm", x, weight, eps=1e-6)
    assert fast.dtype == dtype
    assert torch.equal(fast, wanted)
    packed = both("pack_rows", x, Record.FP8_32)
    assert torch.equal(packed[0][0], packed[1][0])
