"""Packed weights as loading leaves them."""

from __future__ import annotations

import pytest
import torch

from leadline.kernels.packed import ALIGNMENT_LOSS, PackedWeight, WeightFormat, align_scales


def packed(*shape: int, octaves: int) -> PackedWeight:
    """Random codes without NaN, scales that lie within so many octaves."""
    codes = torch.randint(256, shape, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    *groups, rows, columns = shape
    tiles = (*groups, -(-rows // 32), -(-columns // 32))
    scales = torch.randint(121 - octaves, 121, tiles, dtype=torch.uint8)
    return PackedWeight(codes, scales, WeightFormat.FP8_BLOCK32, quantizes_input=False)


@pytest.mark.parametrize("shape", [(64, 256), (2, 32, 128), (40, 100), (1, 1)], ids=str)
def test_aligned_scales_agree_over_128_columns(shape: tuple[int, ...]) -> None:
    weight = packed(*shape, octaves=8)
    aligned = align_scales(weight)
    assert aligned.aligned
    assert not aligned.quantizes_input
    assert aligned.codes.shape == weight.codes.shape
    assert aligned.scales.shape == weight.scales.shape
    for columns in aligned.scales.split(4, dim=-1):
        assert (columns == columns[..., :1]).all()
    change = (aligned.dense.double() - weight.dense.double()).norm()
    assert change <= ALIGNMENT_LOSS * weight.dense.double().norm()


def test_one_scale_stays_as_it_is() -> None:
    weight = packed(64, 256, octaves=1)
    aligned = align_scales(weight)
    assert torch.equal(aligned.codes, weight.codes)
    assert torch.equal(aligned.scales, weight.scales)


def test_scales_of_zeros_do_not_count() -> None:
    weight = packed(32, 128, octaves=1)
    weight.codes[:, :32] = 0
    weight.scales[:, 0] = 254
    aligned = align_scales(weight)
    assert (aligned.scales == 120).all()
    assert torch.equal(aligned.codes, weight.codes)


def test_a_matrix_that_would_change_stays_as_it_is() -> None:
    """Its large values are few enough for the small ones to count."""
    weight = packed(32, 128, octaves=1)
    weight.codes[:, :32] = 0
    weight.codes[0, 0] = 1  # a subnormal beside tiles of scales 14 octaves below its own
    weight.scales[:, 0] = 134
    assert align_scales(weight) is weight


def test_a_stack_is_aligned_where_its_parts_are() -> None:
    plain = packed(32, 256, octaves=8)
    aligned = align_scales(plain)
    assert PackedWeight.stack([aligned, aligned]).aligned
    assert not PackedWeight.stack([aligned, plain]).aligned
