"""Activations as operands of FP8 tensor cores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.kernels.reference import quant
from leadline.kernels.triton.expert_tiles import sort_pairs
from leadline.kernels.triton.fp8_inputs import Inputs, arrange
from tests.kernels.triton.test_experts import choose, rows
from tests.kernels.triton.test_experts_fp8 import over_octaves


def natural(inputs: Inputs) -> Tensor:
    """``[n, K]`` float32 in the order of channels."""
    groups, count, _ = inputs.codes.shape
    blocks = inputs.codes.view(groups, count, 4, 2, 16).transpose(3, 4)
    values = quant.decode_e4m3(blocks.reshape(groups, count, 128))
    return values.transpose(0, 1).flatten(1) * inputs.powers[:, None] / 64


def differ_little(found: Tensor, wanted: Tensor) -> bool:
    """By half of the smallest code below a row's largest."""
    moved = (found - wanted).abs()
    return bool((moved <= 2.0**-17 * wanted.abs().amax(1, keepdim=True)).all())


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("width", [256, 1280])
def test_they_lie_by_expert_even_channels_of_a_block_first(
    device: torch.device, width: int, block: int
) -> None:
    x = rows(9, width + 64, device)[:, :width]
    ids = choose(9, [0, 2, 3], 2, device)
    ids[4] = -1
    tiles = sort_pairs(ids, num_experts=4, tile_size=8)
    found = natural(arrange(x, block, tiles, ids))
    pairs = tiles.pairs[tiles.pairs >= 0].long()
    wanted = quant.round_trip_fp8(x.contiguous(), block).float()
    assert differ_little(found[: len(pairs)], wanted[pairs // 2])


def test_rows_in_their_order(device: torch.device) -> None:
    x = rows(5, 256, device)
    assert differ_little(natural(arrange(x, 32)), quant.round_trip_fp8_32(x).float())
    wanted = quant.round_trip_fp8_row(x).float()
    assert torch.equal(natural(arrange(x, x.shape[1])), wanted)


def test_small_blocks_beside_large_ones_lose_little(device: torch.device) -> None:
    x = over_octaves(20, 512, device)
    x[3] = 0
    found, wanted = natural(arrange(x, 32)), quant.round_trip_fp8_32(x).float()
    assert not torch.equal(found, wanted)
    assert differ_little(found, wanted)


def test_a_broken_row_s_power_is_nan(device: torch.device) -> None:
    x = rows(3, 256, device)
    x[1, 130] = torch.inf
    assert arrange(x, 32).powers.isnan().tolist() == [False, True, False]
