"""Matrix products: the golden units, and loops in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leadline.kernels.packed import LinearWeight, Weight, WeightFormat
from leadline.kernels.reference import linear, quant
from leadline.weights.load import CheckpointSource


def golden_weight(weights: CheckpointSource, unit: str) -> Weight:
    """The checkpoint matrix of ``unit.fp8_linear`` or ``unit.fp4_linear``."""
    if unit == "fp8_linear":
        return weights.linear("layers.0.attn.wq_a", torch.float32)
    stack = weights.experts("layers.0.ffn.experts", "w1", slice(0, 1), torch.float32)
    return LinearWeight(stack.dense[0], stack.format)


@pytest.mark.parametrize("unit", ["fp8_linear", "fp4_linear"])
class TestGoldenUnits:
    def test_input_codes_and_scales(self, units: dict[str, Tensor], unit: str) -> None:
        codes, scales = quant.quantize_fp8_32(units[f"unit.{unit}.x"])
        assert torch.equal(codes, units[f"unit.{unit}.x_codes"])
        assert torch.equal(scales, units[f"unit.{unit}.x_scales"])

    def test_weight(self, units: dict[str, Tensor], weights: CheckpointSource, unit: str) -> None:
        assert torch.equal(golden_weight(weights, unit).dense, units[f"unit.{unit}.w"])

    def test_output(self, units: dict[str, Tensor], weights: CheckpointSource, unit: str) -> None:
        """The file's ``y`` is the float64 sum rounded once, which float32 sums reach here too."""
        y = linear.linear(units[f"unit.{unit}.x"], golden_weight(weights, unit))
        assert torch.equal(y, units[f"unit.{unit}.y"])

    def test_float64_sum(
        self, units: dict[str, Tensor], weights: CheckpointSource, unit: str
    ) -> None:
        weight = golden_weight(weights, unit)
        wide = LinearWeight(weight.dense.double(), weight.format)
        y = linear.linear(units[f"unit.{unit}.x"].double(), wide)
        assert torch.equal(y.float(), units[f"unit.{unit}.y_exact"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("format", WeightFormat)
def test_only_packed_weights_have_their_input_quantised(
    format: WeightFormat, dtype: torch.dtype
) -> None:
    """With the identity as weight, the output is the input as the product saw it."""
    x = torch.randn(3, 64).to(dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    y = linear.linear(x, LinearWeight(torch.eye(64, dtype=wide), format))
    seen = x if format is WeightFormat.PLAIN else quant.round_trip_fp8_32(x)
    assert y.dtype is dtype
    assert torch.equal(y, seen)


def test_input_blocks_are_as_wide_as_the_weight_says() -> None:
    x = torch.randn(3, 320) * torch.exp2(torch.randint(-20, 20, (320,)))
    y = linear.linear(x, LinearWeight(torch.eye(320), WeightFormat.FP8_BLOCK128, 128))
    assert torch.equal(y, quant.round_trip_fp8(x, 128))
    assert not torch.equal(y, quant.round_trip_fp8_32(x))


def test_sums_of_bfloat16_are_not_kept_in_bfloat16() -> None:
    """4096 ones and a weight of 1/64: bf16 partial sums would stop growing at 256 / 64."""
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    weight = LinearWeight(torch.full((1, 4096), 1 / 64), WeightFormat.PLAIN)
    assert linear.linear(x, weight).item() == 64


def test_grouped_linear_is_one_product_per_group() -> None:
    x, weight = torch.randn(5, 3, 7).double(), torch.randn(3, 4, 7).double()
    y = linear.grouped_linear(x, LinearWeight(weight, WeightFormat.PLAIN))
    for group in range(3):
        torch.testing.assert_close(y[:, group], x[:, group] @ weight[group].T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_wide_linear_is_not_rounded(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 64).to(dtype), torch.randn(8, 64)
    y = linear.wide_linear(x, weight)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, (x.double() @ weight.double().T).float())
