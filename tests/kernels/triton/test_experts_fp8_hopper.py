"""Hopper's routed experts of few pairs and FP8 inputs against their definition."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.kernels import batch_invariance
from leadline.kernels.packed import PackedWeight
from leadline.kernels.reference import experts as reference
from leadline.kernels.reference.quant import round_trip_fp8, round_trip_fp8_32
from leadline.kernels.triton import experts, experts_fp8_hopper
from tests.kernels.bounds import FP8_SUM
from tests.kernels.triton.test_experts import LIMIT, choose, definition, rows, stacks
from tests.kernels.triton.test_experts_fp8 import over_octaves
from tests.kernels.triton.test_experts_hopper import crowd

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
runs = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")


@pytest.mark.parametrize(
    ("width", "hidden", "answer"),
    [(512, 256, True), (5120, 2304, True), (384, 256, False), (512, 576, False)],
)
def test_stages_divide_what_they_fit(width: int, hidden: int, answer: bool) -> None:
    assert experts_fp8_hopper.fits(*stacks(2, width, hidden, torch.device("cpu"))) is answer


def test_they_fit_inputs_rounded_to_fp8(device: torch.device) -> None:
    w13, w2 = stacks(2, 512, 256, device)
    assert not experts_fp8_hopper.fits(dataclasses.replace(w13, quantizes_input=False), w2)
    assert not experts_fp8_hopper.fits(w13, dataclasses.replace(w2, quantizes_input=False))


def compare(x: Tensor, ids: Tensor, w13: PackedWeight, w2: PackedWeight) -> Tensor:
    """Ours summed over pairs that have an expert, which is what the definition gives."""
    weights = torch.rand(ids.shape, device=x.device) + 0.1
    pairs = experts_fp8_hopper.pair_outputs(x, ids, weights, w13, w2, limit=LIMIT)
    actual = torch.where(ids.unsqueeze(-1) < 0, 0.0, pairs.view(*ids.shape, -1).float()).sum(1)

    def kept(values: Tensor) -> Tensor:
        return round_trip_fp8(values, w2.input_block)

    given = round_trip_fp8(x, w13.input_block)
    wanted = definition(given, ids, weights, (w13, w2), kept=kept, sum_error=FP8_SUM)
    assert wanted.contains(actual)
    return actual


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(
    "sizes",
    [
        [1, 0, 3],  # tiles of 8
        [8, 9, 7, 0, 1],  # of 16
        [17, 15, 1, 0, 33],  # of 32
        [64, 31, 65, 1, 0, 17],  # of 64
        [200, 63],
    ],
    ids=str,
)
@pytest.mark.parametrize(("width", "hidden"), [(256, 256), (1280, 768)])
def test_tiles_of_any_filling(
    device: torch.device, sizes: list[int], width: int, hidden: int, block: int
) -> None:
    ids = crowd(sizes, device)
    x = over_octaves(len(ids), width, device)
    w13, w2 = (
        dataclasses.replace(weight, input_block=block)
        for weight in stacks(len(sizes), width, hidden, device)
    )
    compare(x, ids, w13, w2)


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("count", [30, 150])
def test_several_choices_and_masked_ones(device: torch.device, count: int) -> None:
    ids = choose(count, [0, 1, 3, 4, 5], 3, device)
    ids[::7, 1] = -1
    ids[20] = -1
    actual = compare(rows(count, 512, device), ids, *stacks(6, 512, 256, device))
    assert not actual[20].any()


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("pairs", [4, 100, 600])
def test_routed_experts_takes_them(device: torch.device, pairs: int) -> None:
    """As many programs as a decode step has, time and again."""
    ids = choose(pairs, list(range(24)), 2, device)
    x, (w13, w2) = rows(pairs, 1280, device), stacks(24, 1280, 2304, device)
    weights = torch.rand(pairs, 2, device=device) + 0.1
    with patch.object(
        experts_fp8_hopper, "pair_outputs", wraps=experts_fp8_hopper.pair_outputs
    ) as ours:
        first, *others = (
            experts.routed_experts(x, ids, weights, w13, w2, limit=LIMIT) for _ in range(20)
        )
    assert ours.call_count == 20
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.gpu
@runs
def test_weights_are_exact(device: torch.device) -> None:
    """Down with one hidden channel at a time gives its columns: all codes, at many scales."""
    w13, w2 = stacks(1, 256, 256, device)
    w2 = dataclasses.replace(w2, dtype=torch.bfloat16)
    w2.scales[:] = torch.tensor([50, 64, 90, 100, 127, 130, 160, 200], device=device)
    # Gate and up of channel i are positive where x is the i-th unit vector, and 0 elsewhere.
    w13.codes.zero_()
    w13.scales.fill_(127)
    for channel in range(256):
        nibble = 0x2 << 4 * (channel % 2)  # 1.0
        w13.codes[0, channel, channel // 2] = nibble
        w13.codes[0, 256 + channel, channel // 2] = nibble
    x = torch.eye(256, device=device, dtype=torch.bfloat16)
    ids = torch.zeros(256, 1, dtype=torch.int64, device=device)
    ones = torch.ones(256, 1, device=device)
    kept = round_trip_fp8_32(torch.nn.functional.silu(torch.ones(1, 32)).bfloat16())
    hidden = kept[0, 0].item()
    outputs = experts_fp8_hopper.pair_outputs(x, ids, ones, w13, w2, limit=LIMIT)
    assert torch.equal(outputs, (w2.dense[0].T.double() * hidden).float().bfloat16())


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("byte", [0, 128, 160, 254, 255])
def test_extreme_scales(device: torch.device, byte: int) -> None:
    """The clamp of SwiGLU bounds what large ones lead to; 255 is NaN."""
    x, (w13, w2) = rows(50, 256, device) / 256, stacks(8, 256, 256, device)
    w13.scales[0, 3, 1] = byte
    w13.codes[0, 3] &= 0xBB  # magnitudes up to 1.5, so that 254 stays finite
    ids = crowd([9, 3, 6, 7, 7, 6, 6, 6], device)
    weights = torch.rand(50, 1, device=device)
    actual = experts_fp8_hopper.pair_outputs(x, ids, weights, w13, w2, limit=LIMIT).float()
    wanted = reference.routed_experts(x, ids, weights, w13, w2, limit=LIMIT)
    assert torch.equal(actual.isnan(), wanted.isnan())
    assert actual.isnan().any() == (byte == 255)
    actual, wanted = actual.nan_to_num(), wanted.nan_to_num()
    assert (actual - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.gpu
@runs
def test_broken_rows_stay_alone(device: torch.device) -> None:
    x, (w13, w2) = rows(20, 256, device), stacks(2, 256, 256, device)
    ids, weights = crowd([10, 10], device), torch.rand(20, 1, device=device)
    sound = experts_fp8_hopper.pair_outputs(x, ids, weights, w13, w2, limit=LIMIT)
    x[2], x[7, 100] = torch.nan, torch.inf
    actual = experts_fp8_hopper.pair_outputs(x, ids, weights, w13, w2, limit=LIMIT)
    others = torch.ones(20, dtype=torch.bool)
    others[[2, 7]] = False
    assert torch.equal(actual[others], sound[others])
    assert not actual[~others].isfinite().any()


@pytest.mark.gpu
@runs
def test_rows_alone_and_together(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariance.switch, "enabled", True)
    x, (w13, w2) = rows(60, 256, device), stacks(3, 256, 256, device)
    ids, weights = choose(60, [0, 1, 2], 2, device), torch.rand(60, 2, device=device)
    together = experts_fp8_hopper.pair_outputs(x, ids, weights, w13, w2, limit=LIMIT)
    for some in (slice(40, 41), slice(20, 50)):
        alone = experts_fp8_hopper.pair_outputs(
            x[some], ids[some], weights[some], w13, w2, limit=LIMIT
        )
        assert torch.equal(alone, together.view(60, 2, -1)[some].flatten(0, 1))
