"""Routed experts with packed weights against their definition."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.kernels.packed import LinearWeight, PackedWeight, WeightFormat
from leadline.kernels.reference import experts as reference
from leadline.kernels.reference.quant import round_trip_fp8, round_trip_fp8_32
from leadline.kernels.triton import experts
from leadline.kernels.triton.expert_tiles import prepare
from tests.kernels.bounds import FLOAT32_SUM, Bounded, bf16, expert_outputs

LIMIT = 4.0
Stacks = tuple[PackedWeight, PackedWeight]


def stack(experts: int, out: int, columns: int, device: torch.device) -> PackedWeight:
    """Every code, and scales of some octaves."""
    codes = torch.randint(256, (experts, out, columns // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(
        121, 125, (experts, out, columns // 32), dtype=torch.uint8, device=device
    )
    # In float32, the reference's sums are: a product in bf16 may round parts of them.
    return PackedWeight(codes, scales, WeightFormat.MXFP4, dtype=torch.float32)


def stacks(num_experts: int, width: int, hidden: int, device: torch.device) -> Stacks:
    return (
        stack(num_experts, 2 * hidden, width, device),
        stack(num_experts, width, hidden, device),
    )


def choose(rows: int, among: list[int], k: int, device: torch.device) -> Tensor:
    """``[rows, k]`` ascending, uniform among some experts."""
    chosen = torch.rand(rows, len(among)).topk(k).indices
    return torch.tensor(among)[chosen].sort().values.to(device)


def definition(
    x: Tensor, ids: Tensor, weights: Tensor, stacks: Stacks, **roundings: Any
) -> Bounded:
    """Of rows as the first product takes them."""
    dense = (dataclasses.replace(w, dtype=torch.float64).dense for w in stacks)
    return expert_outputs(x, ids, weights, *dense, limit=LIMIT, activation=bf16, **roundings)


def compare(x: Tensor, ids: Tensor, w13: PackedWeight, w2: PackedWeight) -> Tensor:
    """Ours, which is what the definition gives."""
    weights = torch.rand(ids.shape, device=x.device) + 0.1
    actual = experts.routed_experts(x, ids, weights, w13, w2, limit=LIMIT)
    assert actual.dtype is torch.float32
    given = round_trip_fp8(x, w13.input_block) if w13.quantizes_input else x
    kept = round_trip_fp8_32 if w2.quantizes_input else bf16
    wanted = definition(given, ids, weights, (w13, w2), kept=kept, sum_error=FLOAT32_SUM)
    assert wanted.contains(actual)
    return actual


def rows(count: int, width: int, device: torch.device) -> Tensor:
    return torch.randn(count, width, dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize(
    ("num_rows", "width", "hidden"),
    [(1, 64, 32), (5, 160, 96), (16, 256, 256), (40, 96, 64)],
)
def test_one_row_some_and_many(
    device: torch.device, num_rows: int, width: int, hidden: int
) -> None:
    """Tiles of 8, 16 and 32; expert 2 gets none; blocks of columns and of K end early."""
    ids = choose(num_rows, [0, 1, 3, 4], 2, device)
    compare(rows(num_rows, width, device), ids, *stacks(5, width, hidden, device))


def test_tiles_of_a_prompt_that_are_full_half_full_and_emptier(device: torch.device) -> None:
    ids = torch.tensor([0] * 140 + [1] * 60 + [2] * 10, device=device)[:, None]
    compare(rows(210, 32, device), ids, *stacks(3, 32, 32, device))


def test_all_rows_on_one_expert(device: torch.device) -> None:
    """More than a tile holds."""
    ids = torch.full((20, 1), 3, device=device)
    compare(rows(20, 64, device), ids, *stacks(8, 64, 32, device))


def test_a_draft_layer_s_128_experts(device: torch.device) -> None:
    ids = choose(4, list(range(128)), 3, device)
    compare(rows(4, 64, device), ids, *stacks(128, 64, 32, device))


def test_a_slice_that_no_block_divides(device: torch.device) -> None:
    """The width of tensor parallelism, 576."""
    ids = choose(2, [0, 1], 1, device)
    compare(rows(2, 64, device), ids, *stacks(2, 64, 576, device))


def test_no_rows(device: torch.device) -> None:
    w13, w2 = stacks(2, 64, 32, device)
    empty = rows(0, 64, device)
    ids = torch.empty(0, 2, dtype=torch.int64, device=device)
    out = experts.routed_experts(empty, ids, ids.float(), w13, w2, limit=LIMIT)
    assert out.shape == (0, 64)


def test_masked_choices_add_nothing(device: torch.device) -> None:
    """Nor do they name an expert, whatever the last one holds."""
    ids = torch.tensor([[-1, 1], [-1, -1], [0, 2], [-1, 2]], device=device)
    w13, w2 = stacks(3, 64, 32, device)
    actual = compare(rows(4, 64, device), ids, w13, w2)
    assert not actual[1].any()


def test_a_broken_row_stays_alone(device: torch.device) -> None:
    x, w13, w2 = rows(6, 64, device), *stacks(3, 64, 32, device)
    ids, weights = choose(6, [0, 1, 2], 2, device), torch.rand(6, 2, device=device)
    sound = experts.routed_experts(x, ids, weights, w13, w2, limit=LIMIT)
    x[2] = torch.nan
    actual = experts.routed_experts(x, ids, weights, w13, w2, limit=LIMIT)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(actual[others], sound[others])
    assert actual[2].isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # a sigmoid of the interpreter's
@pytest.mark.parametrize("byte", [0, 128, 129, 254, 255])
def test_extreme_scales(device: torch.device, byte: int) -> None:
    """The clamp of SwiGLU bounds what 254 leads to; 255 is NaN."""
    x, w13, w2 = rows(3, 64, device) / 256, *stacks(2, 64, 32, device)
    w13.scales[0, 3, 1] = byte
    w13.codes[0, 3] &= 0xBB  # magnitudes up to 1.5, so that 254 stays finite
    ids, weights = choose(3, [0, 1], 1, device), torch.rand(3, 1, device=device)
    ids[0] = 0
    actual = experts.routed_experts(x, ids, weights, w13, w2, limit=LIMIT)
    wanted = reference.routed_experts(x, ids, weights, w13, w2, limit=LIMIT)
    torch.testing.assert_close(actual, wanted, rtol=1e-2, atol=1e-2, equal_nan=True)
    assert actual[0].isnan().any() == (byte == 255)


# Enough pairs of widths that Hopper's own kernels take.
MANY = pytest.param(90, 256, 128, marks=pytest.mark.gpu)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize(("num_rows", "width", "hidden"), [(3, 64, 32), MANY])
def test_inputs_are_rounded_where_the_weights_say(
    device: torch.device, first: bool, second: bool, num_rows: int, width: int, hidden: int
) -> None:
    w13, w2 = (
        PackedWeight(w.codes, w.scales, w.format, quantizes, w.dtype)
        for w, quantizes in zip(stacks(2, width, hidden, device), (first, second), strict=True)
    )
    compare(rows(num_rows, width, device), choose(num_rows, [0, 1], 2, device), w13, w2)


@pytest.mark.parametrize(("num_rows", "width", "hidden"), [(3, 256, 160), (20, 160, 128), MANY])
def test_inputs_with_a_scale_for_128_channels(
    device: torch.device, num_rows: int, width: int, hidden: int
) -> None:
    """Hidden rows keep the finer scales, which is no more than a part of their rounding."""
    w13, w2 = (dataclasses.replace(w, input_block=128) for w in stacks(2, width, hidden, device))
    octaves = torch.randint(-9, 0, (width,), device=device).exp2().bfloat16()
    x = rows(num_rows, width, device) * octaves
    compare(x, choose(num_rows, [0, 1], 2, device), w13, w2)


def test_rows_may_lie_apart(device: torch.device) -> None:
    x = rows(3, 128, device)[:, 64:]
    compare(x, choose(3, [0, 1], 2, device), *stacks(2, 64, 32, device))


def test_the_shared_expert_is_added_before_the_rounding(device: torch.device) -> None:
    x, w13, w2 = rows(3, 64, device), *stacks(4, 64, 32, device)
    ids, weights = choose(3, [0, 1, 2, 3], 2, device), torch.rand(3, 2, device=device)
    shared = rows(3, 64, device)
    actual = experts.routed_experts(x, ids, weights, w13, w2, limit=LIMIT, shared=lambda: shared)
    total = experts.routed_experts(x, ids, weights, w13, w2, limit=LIMIT)
    assert torch.equal(actual, (total + shared).bfloat16())


def test_plain_stacks_run_by_the_reference(device: torch.device) -> None:
    x = rows(3, 64, device)
    w13, w2 = (LinearWeight(w.dense, WeightFormat.PLAIN) for w in stacks(2, 64, 32, device))
    ids, weights = choose(3, [0, 1], 1, device), torch.rand(3, 1, device=device)
    actual = experts.routed_experts(x, ids, weights, w13, w2, limit=LIMIT)
    assert torch.equal(actual, reference.routed_experts(x, ids, weights, w13, w2, limit=LIMIT))


def test_tiles_cover_every_pair_once(device: torch.device) -> None:
    """More pairs than a program looks at in one go; in their order within an expert."""
    ids = torch.randint(-1, 7, (3, 700), device=device)
    tiles, _ = prepare(rows(3, 32, device), ids, num_experts=7, tile_size=128, input_block=0)
    flat = ids.flatten().cpu()
    found = []
    spans = tiles.spans.tolist()
    for word in spans[: spans.index(-1)]:
        first, size = word & 0xFFFFFFFF, (word >> 32) & 0xFF
        pairs = tiles.pairs[first : first + size].cpu()
        assert (flat[pairs] == word >> 40).all()
        found.append(pairs)
    assert set(spans[len(found) :]) == {-1}
    assert (tiles.pairs[sum(map(len, found)) :] == -1).all()
    by_expert = flat.argsort(stable=True)
    assert torch.equal(torch.cat(found).long(), by_expert[(flat < 0).sum() :])
