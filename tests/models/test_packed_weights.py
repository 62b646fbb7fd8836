"""A model whose weights stay packed computes what one with dequantised weights does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.config.presets import TINY_WINDOW128
from leadline.core.errors import ConfigError
from leadline.kernels.packed import PackedWeight, WeightFormat
from tests.steps import make_stepper


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64},
        {"quantize_activations": False},
    ],
    ids=["float32", "bfloat16", "float64", "exact-activations"],
)
@pytest.mark.parametrize("checkpoint", ["v41-reference", "random"])
def test_logits_are_the_same(golden: Path, checkpoint: str, options: dict[str, Any]) -> None:
    model = TINY_WINDOW128 if checkpoint == "random" else golden / checkpoint
    tokens = torch.randint(3, 500, (140,)).tolist()
    dense, packed = (
        stepper.feed(stepper.start(tokens), 70)
        for stepper in (make_stepper(model, packed=p, **options) for p in (False, True))
    )
    assert torch.equal(packed, dense)


def test_matrices_stay_as_stored() -> None:
    stepper = make_stepper(TINY_WINDOW128, packed=True, dtype=torch.bfloat16)
    block = stepper.model.blocks[2]
    for weight in (block.attn.wq_b, block.attn.wo_a, block.ffn.shared_w13, block.ffn.w13):
        assert isinstance(weight, PackedWeight)
        assert weight.codes.dtype is weight.scales.dtype is torch.uint8
    assert block.ffn.w13.format is WeightFormat.MXFP4
    assert block.attn.wq_b.quantizes_input
    assert isinstance(block.attn.wo_a, PackedWeight)
    assert not block.attn.wo_a.quantizes_input
    assert stepper.model.head.dtype is torch.bfloat16


def test_groups_that_would_share_scales_are_refused() -> None:
    config = dataclasses.replace(TINY_WINDOW128, o_lora_rank=16)
    make_stepper(config)
    with pytest.raises(ConfigError, match="16 rows for each of 4 groups"):
        make_stepper(config, packed=True)
