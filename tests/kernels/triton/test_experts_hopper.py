"""Hopper's routed experts; without a Hopper GPU, the order of what they multiply."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.kernels import batch_invariance
from leadline.kernels.reference import experts as reference
from leadline.kernels.reference import quant as reference_quant
from leadline.kernels.triton import experts, experts_hopper
from leadline.kernels.triton.expert_tiles import sort_pairs
from leadline.kernels.triton.mxfp4_hopper import arrange
from tests.kernels.triton.test_experts import LIMIT, Stacks, choose, compare, rows, stacks

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
runs = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels for any number of pairs."""
    monkeypatch.setattr(experts, "_SOME", 0)
    monkeypatch.setattr(experts, "_SEVERAL", -1)


def natural(values: Tensor) -> Tensor:
    """``[pairs, K]`` in the order of channels."""
    blocks = values.reshape(-1, 2, values.shape[1], 2, 2, 2, 4, 2)  # word, 2; pair, 8 apart, thread
    return blocks.permute(2, 0, 6, 1, 3, 7, 4, 5).reshape(values.shape[1], -1)


@pytest.mark.parametrize("rounds", [True, False], ids=["rounded", "as it is"])
@pytest.mark.parametrize("width", [128, 1280])
def test_inputs_lie_by_expert_in_another_order_of_channels(
    device: torch.device, width: int, rounds: bool
) -> None:
    x = rows(9, width + 64, device)[:, :width]
    ids = choose(9, [0, 2, 3], 2, device)
    ids[4] = -1
    tiles = sort_pairs(ids, num_experts=4, tile_size=32)
    found = natural(arrange(x, tiles, ids, 32 if rounds else 0))
    pairs = tiles.pairs[tiles.pairs >= 0].long()
    wanted = reference_quant.round_trip_fp8_32(x.contiguous()) if rounds else x
    assert torch.equal(found[: len(pairs)], wanted[pairs // 2])
    assert torch.equal(tiles.places[pairs].long(), torch.arange(len(pairs), device=device))


@pytest.mark.parametrize(
    ("width", "hidden", "answer"),
    [(512, 128, True), (5120, 2304, True), (384, 128, False), (512, 576, False)],
)
def test_tiles_divide_what_they_fit(width: int, hidden: int, answer: bool) -> None:
    assert experts_hopper.fits(stacks(2, width, hidden, torch.device("cpu"))[1]) is answer


def crowd(sizes: list[int], device: torch.device) -> Tensor:
    """``[sum, 1]``: so many rows for each expert, mixed."""
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return ids[torch.randperm(len(ids))].to(device)[:, None]


@pytest.mark.gpu
@runs
@pytest.mark.parametrize(
    "sizes",
    [
        [1, 0, 40],  # tiles of 32
        [32, 33, 16, 17],
        [64, 65, 31, 1, 0],  # of 64
        [128, 129, 127, 256, 32, 33, 0],  # of 128
        [300, 1],
    ],
    ids=str,
)
@pytest.mark.parametrize(("width", "hidden"), [(256, 128), (512, 384)])
def test_tiles_of_any_filling(
    device: torch.device, sizes: list[int], width: int, hidden: int
) -> None:
    ids = crowd(sizes, device)
    compare(rows(len(ids), width, device), ids, *stacks(len(sizes), width, hidden, device))


@pytest.mark.gpu
@runs
def test_several_choices_and_masked_ones(device: torch.device) -> None:
    ids = choose(150, [0, 1, 3, 4, 5], 3, device)
    ids[::7, 1] = -1
    ids[20] = -1
    actual = compare(rows(150, 512, device), ids, *stacks(6, 512, 256, device))
    assert not actual[20].any()


def plain(num_experts: int, width: int, hidden: int, device: torch.device) -> Stacks:
    """Stacks whose inputs are taken as they are."""
    first, second = stacks(num_experts, width, hidden, device)
    return (
        dataclasses.replace(first, quantizes_input=False),
        dataclasses.replace(second, quantizes_input=False),
    )


@pytest.mark.gpu
@runs
def test_weights_are_exact(device: torch.device) -> None:
    """Down with one hidden channel at a time gives its columns: all codes, at many scales."""
    w13, w2 = plain(1, 256, 128, device)
    w2 = dataclasses.replace(w2, dtype=torch.bfloat16)
    w2.scales[:] = torch.tensor([64, 100, 127, 160], device=device)
    # Gate and up of channel i are positive where x is the i-th unit vector, and 0 elsewhere.
    w13.codes.zero_()
    w13.scales.fill_(127)
    for channel in range(128):
        nibble = 0x2 << 4 * (channel % 2)  # 1.0
        w13.codes[0, channel, channel // 2] = nibble
        w13.codes[0, 128 + channel, channel // 2] = nibble
    x = torch.eye(128, 256, device=device, dtype=torch.bfloat16)
    ids = torch.zeros(128, 1, dtype=torch.int64, device=device)
    ones = torch.ones(128, 1, device=device)
    hidden = torch.nn.functional.silu(torch.ones(())).bfloat16().item()
    outputs = experts_hopper.pair_outputs(x, ids, ones, w13, w2, limit=LIMIT)
    assert torch.equal(outputs, (w2.dense[0].T.double() * hidden).float().bfloat16())


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("byte", [0, 128, 160, 161, 254, 255])
def test_extreme_scales(device: torch.device, byte: int) -> None:
    """The clamp of SwiGLU bounds what large ones lead to; 255 is NaN."""
    x, (w13, w2) = rows(50, 256, device) / 256, stacks(2, 256, 128, device)
    w13.scales[0, 3, 1] = byte
    w13.codes[0, 3] &= 0xBB  # magnitudes up to 1.5, so that 254 stays finite
    ids = crowd([25, 25], device)
    weights = torch.rand(50, 1, device=device)
    actual = experts_hopper.pair_outputs(x, ids, weights, w13, w2, limit=LIMIT).float()
    wanted = reference.routed_experts(x, ids, weights, w13, w2, limit=LIMIT)
    assert torch.equal(actual.isnan(), wanted.isnan())
    assert actual.isnan().any() == (byte == 255)
    actual, wanted = actual.nan_to_num(), wanted.nan_to_num()
    assert (actual - wanted).norm() <= 5e-3 * wanted.norm()


@pytest.mark.gpu
@runs
def test_broken_rows_stay_alone(device: torch.device) -> None:
    x, (w13, w2) = rows(60, 256, device), stacks(2, 256, 128, device)
    ids, weights = crowd([30, 30], device), torch.rand(60, 1, device=device)
    sound = experts_hopper.pair_outputs(x, ids, weights, w13, w2, limit=LIMIT)
    x[2], x[7, 100] = torch.nan, torch.inf
    actual = experts_hopper.pair_outputs(x, ids, weights, w13, w2, limit=LIMIT)
    others = torch.ones(60, dtype=torch.bool)
    others[[2, 7]] = False
    assert torch.equal(actual[others], sound[others])
    assert not actual[~others].isfinite().any()


@pytest.mark.gpu
@runs
def test_rows_alone_and_together(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariance.switch, "enabled", True)
    x, (w13, w2) = rows(200, 256, device), stacks(3, 256, 128, device)
    ids, weights = choose(200, [0, 1, 2], 2, device), torch.rand(200, 2, device=device)
    together = experts_hopper.pair_outputs(x, ids, weights, w13, w2, limit=LIMIT)
    for some in (slice(40, 41), slice(50, 90)):
        alone = experts_hopper.pair_outputs(x[some], ids[some], weights[some], w13, w2, limit=LIMIT)
        assert torch.equal(alone, together.view(200, 2, -1)[some].flatten(0, 1))
