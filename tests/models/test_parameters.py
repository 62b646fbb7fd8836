from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from leadline.core.errors import CheckpointError, ConfigError
from leadline.kernels.packed import LinearWeight, WeightFormat
from leadline.models.common.parameters import Parameters
from leadline.parallel.placement import Placement
from leadline.weights.source import WeightSource


class TwoFormats:
    """A source whose w3 is packed and whose w1 is not."""

    def linear(self, name: str, dtype: torch.dtype, **cut: Any) -> LinearWeight:
        packed = name.endswith("w3")
        return LinearWeight(
            torch.ones(2, 3, dtype=dtype),
            WeightFormat.FP8_BLOCK32 if packed else WeightFormat.PLAIN,
        )

    def experts(self, *_: Any, **__: Any) -> LinearWeight:
        return LinearWeight(torch.ones(2, 2, 3), WeightFormat.PLAIN)


def make(*, quantize_activations: bool, batch_invariant: bool = False) -> Parameters:
    return Parameters(
        cast(WeightSource, TwoFormats()),
        torch.float32,
        torch.device("cpu"),
        Placement(),
        quantize_activations=quantize_activations,
        batch_invariant=batch_invariant,
    )


def test_matrices_of_one_product_have_one_format() -> None:
    with pytest.raises(CheckpointError, match="different formats, fp8_block32, plain"):
        make(quantize_activations=True).stacked_linear("ffn.w1", "ffn.w3")


def test_without_activation_rounding_formats_make_no_difference() -> None:
    stacked = make(quantize_activations=False).stacked_linear("ffn.w1", "ffn.w3")
    assert stacked.format is WeightFormat.PLAIN
    assert stacked.dense.shape == (4, 3)


def test_plain_stacks_have_no_batch_invariant_kernels() -> None:
    params = make(quantize_activations=True, batch_invariant=True)
    with pytest.raises(ConfigError, match="ffn is stored as plain, and batch_invariant has"):
        params.experts("ffn", "w2", experts=slice(None))
    with pytest.raises(ConfigError, match="wo_a is stored as plain, and batch_invariant has"):
        params.grouped_linear("wo_a", groups=2)
