"""Products with packed weights against their definitions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.kernels import ops
from leadline.kernels.packed import LinearWeight, PackedWeight, WeightFormat
from leadline.kernels.reference import experts as reference_experts
from leadline.kernels.reference import linear as reference
from leadline.kernels.reference import quant as reference_quant
from leadline.kernels.triton import grouped_linear, linear, packed_matmul, quant, shared_expert


def packed(*shape: int, device: torch.device, quantizes_input: bool = True) -> PackedWeight:
    """Random codes without NaN, scales as trained weights have them."""
    codes = torch.randint(256, shape, device=device, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    *groups, rows, width = shape
    tiles = (*groups, -(-rows // 32), -(-width // 32))
    scales = torch.randint(113, 122, tiles, device=device, dtype=torch.uint8)
    return PackedWeight(codes, scales, WeightFormat.FP8_BLOCK32, quantizes_input)


def tokens(*shape: int, device: torch.device) -> Tensor:
    """A hundredth of the channels thirty times as large (kernels.md 0.4)."""
    large = 1 + 29.0 * (torch.rand(shape[-1], device=device) < 0.01)
    return (torch.randn(shape, device=device) * large).bfloat16()


def assert_close(actual: Tensor, wanted: Tensor) -> None:
    assert actual.dtype is torch.bfloat16
    assert actual.shape == wanted.shape
    error = (actual.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    assert error <= 2.5e-3


def exact(x: Tensor, weight: PackedWeight) -> Tensor:
    """The product in float64."""
    if weight.quantizes_input:
        x = reference_quant.round_trip_fp8_32(x)
    dense = dataclasses.replace(weight, dtype=torch.float64).dense
    return torch.einsum("m...i,...oi->m...o", x.double(), dense)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 63, 64, 65, 129])
def test_any_number_of_tokens(device: torch.device, count: int) -> None:
    x, weight = tokens(count, 256, device=device), packed(96, 256, device=device)
    assert_close(linear.linear(x, weight), exact(x, weight))


@pytest.mark.parametrize(
    ("rows", "width"),
    [(1, 32), (33, 64), (64, 96), (80, 128), (100, 1280), (200, 160), (32, 800)],
    ids=str,
)
@pytest.mark.parametrize("count", [2, 70])
def test_any_shape(device: torch.device, count: int, rows: int, width: int) -> None:
    x, weight = tokens(count, width, device=device), packed(rows, width, device=device)
    assert_close(linear.linear(x, weight), exact(x, weight))
