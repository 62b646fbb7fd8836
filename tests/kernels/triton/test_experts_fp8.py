"""Routed experts with E4M3 activations and a scale a row against their definition."""

from __future__ import annotations

from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.kernels.packed import PackedWeight
from leadline.kernels.reference import experts as reference
from leadline.kernels.reference import quant
from leadline.kernels.triton import experts, experts_fp8
from leadline.kernels.triton.fp8_tiles import SPAN, quantize_rows
from tests.kernels.bounds import FP8_SUM, Bounded
from tests.kernels.triton.test_experts import LIMIT, choose, definition, rows, stacks


def over_octaves(count: int, width: int, device: torch.device) -> Tensor:
    """Blocks of 32 channels so far apart that the smallest of a row lose bits."""
    octaves = torch.randint(-16, 1, (count, width // 32), device=device)
    powers = torch.exp2(octaves).repeat_interleave(32, 1)
    return (rows(count, width, device) * powers).bfloat16()


def by_pairs(
    x: Tensor, ids: Tensor, weights: Tensor, w13: PackedWeight, w2: PackedWeight
) -> Tensor:
    """Sums over pairs that have an expert."""
    pairs = experts_fp8.pair_outputs(x, ids, weights, w13, w2, limit=LIMIT)
    pairs = pairs.view(*ids.shape, -1).float()
    return torch.where(ids.unsqueeze(-1) < 0, 0.0, pairs).sum(1)


def by_definition(
    x: Tensor, ids: Tensor, weights: Tensor, w13: PackedWeight, w2: PackedWeight
) -> Bounded:
    kept = quant.round_trip_fp8_row
    return definition(kept(x), ids, weights, (w13, w2), kept=kept, sum_error=FP8_SUM)


def compare(x: Tensor, ids: Tensor, w13: PackedWeight, w2: PackedWeight) -> Tensor:
    """Ours, which is what the definition gives."""
    weights = torch.rand(ids.shape, device=x.device) + 0.1
    actual = by_pairs(x, ids, weights, w13, w2)
    assert by_definition(x, ids, weights, w13, w2).contains(actual)
    return actual


@pytest.mark.parametrize(
    ("num_rows", "width", "hidden"), [(1, 64, 32), (5, 160, 96), (20, 256, 64)]
)
def test_one_row_some_and_many(
    device: torch.device, num_rows: int, width: int, hidden: int
) -> None:
    """Expert 2 gets none; rows of weights are whole spans or end early, as blocks of rows do."""
    ids = choose(num_rows, [0, 1, 3, 4], 2, device)
    compare(over_octaves(num_rows, width, device), ids, *stacks(5, width, hidden, device))


def test_all_rows_on_one_expert(device: torch.device) -> None:
    """More than a tile holds."""
    ids = torch.full((70, 1), 1, device=device)
    compare(rows(70, 64, device), ids, *stacks(3, 64, 32, device))


def test_a_slice_that_no_span_divides(device: torch.device) -> None:
    """The width of tensor parallelism, 576: rows of 18 scales."""
    ids = choose(2, [0, 1], 1, device)
    compare(rows(2, 64, device), ids, *stacks(2, 64, 576, device))


def test_masked_choices_name_no_expert(device: torch.device) -> None:
    ids = torch.tensor([[-1, 1], [-1, -1], [0, 2], [-1, 2]], device=device)
    actual = compare(rows(4, 64, device), ids, *stacks(3, 64, 32, device))
    assert not actual[1].any()


def test_a_broken_row_stays_alone(device: torch.device) -> None:
    x, w13, w2 = rows(6, 64, device), *stacks(3, 64, 32, device)
    ids, weights = choose(6, [0, 1, 2], 2, device), torch.rand(6, 2, device=device)
    sound = by_pairs(x, ids, weights, w13, w2)
    x[2, 5] = torch.nan
    actual = by_pairs(x, ids, weights, w13, w2)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(actual[others], sound[others])
    assert actual[2].isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # a sigmoid of the interpreter's
@pytest.mark.parametrize("byte", [0, 100, 140, 254, 255])
def test_extreme_scales(device: torch.device, byte: int) -> None:
    """Far from the others of their row; the clamp bounds what 254 leads to, and 255 is NaN."""
    x, w13, w2 = rows(3, 64, device) / 256, *stacks(2, 64, 32, device)
    w13.scales[0, 3, 1] = byte
    w13.codes[0, 3] &= 0xBB  # magnitudes up to 1.5, so that 254 stays finite
    ids, weights = torch.tensor([[0], [0], [1]], device=device), torch.rand(3, 1, device=device)
    actual = by_pairs(x, ids, weights, w13, w2)
    wanted = reference.routed_experts(x, ids, weights, w13, w2, limit=LIMIT, row_scales=True)
    torch.testing.assert_close(actual, wanted, rtol=1e-2, atol=1e-2, equal_nan=True)
    assert actual[0].isnan().any() == (byte == 255)


def test_rows_of_smallest_scales_give_zeros(device: torch.device) -> None:
    x, w13, w2 = rows(3, 64, device), *stacks(2, 64, 32, device)
    w2.scales.zero_()
    actual = by_pairs(x, choose(3, [0, 1], 1, device), torch.rand(3, 1, device=device), w13, w2)
    assert actual.abs().max() < 1e-30


def test_scales_of_one_row_may_lie_26_octaves_apart(device: torch.device) -> None:
    """Inputs that are small where weights are large: every block counts."""
    x, w13, w2 = rows(4, 128, device), *stacks(2, 128, 32, device)
    steps = torch.tensor([0, 5, 8, 13], dtype=torch.uint8, device=device)
    w13.scales.copy_(112 + 2 * steps)
    x *= torch.exp2(-steps.float()).repeat_interleave(32)
    w13.codes[:, :, 1:] &= 0x99  # magnitudes of 0 and 0.5 where they would drown the first
    compare(x, choose(4, [0, 1], 1, device), w13, w2)


@pytest.mark.parametrize("width", [SPAN, 96, 5120])
def test_rows_become_the_definition_s_codes(device: torch.device, width: int) -> None:
    """In another order, which the products' other operand shares; zeros fill the last span."""
    x = over_octaves(3, width, device)
    x[1] = 0
    codes, powers = quantize_rows(x)
    spans = codes.view(torch.uint8).view(3, -1, 2, 4, 4, 4).permute(0, 1, 4, 3, 2, 5).flatten(1)
    assert not spans[:, width:].any()
    values = quant.decode_e4m3(spans[:, :width].contiguous()) * powers[:, None] * 2.0**-22
    assert torch.equal(values.bfloat16(), quant.round_trip_fp8_row(x))


def test_quantising_makes_a_broken_row_s_power_nan(device: torch.device) -> None:
    x = rows(3, 64, device)
    x[1, 7] = -torch.inf
    _, powers = quantize_rows(x)
    assert powers.isnan().tolist() == [False, True, False]


def test_rows_of_no_pair_are_left_alone(device: torch.device) -> None:
    """They hold whatever memory held."""
    x = rows(3, 64, device)
    x[1:] = torch.nan
    used = torch.tensor([7, -1, -1], dtype=torch.int32, device=device)
    with patch.object(torch, "empty", torch.zeros):
        codes, powers = quantize_rows(x, used)
    assert (powers != 0).tolist() == [True, False, False]
    assert not codes[1:].view(torch.uint8).any()


@pytest.mark.parametrize(("num_rows", "row_scales"), [(31, True), (32, True), (32, False)])
def test_row_scales_count_from_32_rows_an_expert(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, num_rows: int, row_scales: bool
) -> None:
    pair_outputs = Mock(wraps=experts_fp8.pair_outputs)
    monkeypatch.setattr(experts_fp8, "pair_outputs", pair_outputs)
    x, w13, w2 = rows(num_rows, 64, device), *stacks(2, 64, 32, device)
    ids, weights = choose(num_rows, [0, 1], 2, device), torch.rand(num_rows, 2, device=device)
    operands = (x, ids, weights, w13, w2)
    actual = experts.routed_experts(*operands, limit=LIMIT, row_scales=row_scales)
    assert pair_outputs.called == (row_scales and num_rows == 32)
    if pair_outputs.called:
        assert by_definition(*operands).contains(actual)
    else:
        assert torch.equal(actual, experts.routed_experts(*operands, limit=LIMIT))
