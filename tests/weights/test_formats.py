"""Packed formats: golden bytes decode exactly, encoders round to the nearest code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from leadline.core.errors import ConfigError
from leadline.kernels.packed import WeightFormat
from leadline.weights.formats import PACKINGS, decode, encode

GOLDEN_GROUPS = {
    "fp8_block32": (WeightFormat.FP8_BLOCK32, "weight_u8"),
    "fp8_block128": (WeightFormat.FP8_BLOCK128, "weight_u8"),
    "fp8_row32": (WeightFormat.FP8_ROW32, "weight_u8"),
    "mxfp4": (WeightFormat.MXFP4, "packed_u8"),
}
# Largest distance to the nearest code, relative to the largest value of a block.
HALF_STEP = {
    WeightFormat.FP8_BLOCK32: 1 / 16,
    WeightFormat.FP8_BLOCK128: 1 / 16,
    WeightFormat.FP8_ROW32: 1 / 16,
    WeightFormat.MXFP4: 1 / 4,
}


@pytest.mark.parametrize("group", GOLDEN_GROUPS)
def test_golden_bytes_decode_exactly(golden: Path, group: str) -> None:
    vectors = load_file(golden / "quant" / "vectors.safetensors")
    format, codes = GOLDEN_GROUPS[group]
    decoded = decode(format, vectors[f"{group}.{codes}"], vectors[f"{group}.scale_ue8m0_u8"])
    assert torch.equal(decoded, vectors[f"{group}.dequant_fp32"])


@pytest.mark.parametrize("format", PACKINGS)
def test_what_a_format_can_hold_survives_it(format: WeightFormat) -> None:
    once = decode(format, *encode(format, levelled(192, 320)))
    assert torch.equal(decode(format, *encode(format, once)), once)


@pytest.mark.parametrize("format", PACKINGS)
def test_encoding_is_off_by_half_a_step_at_most(format: WeightFormat) -> None:
    values = levelled(256, 384)
    decoded = decode(format, *encode(format, values))
    step = PACKINGS[format].block
    blocks = (values.unfold(0, step[0], step[0]).unfold(1, step[1], step[1])).abs().amax((2, 3))
    bound = blocks.repeat_interleave(step[0], 0).repeat_interleave(step[1], 1)
    assert ((decoded - values).abs() <= HALF_STEP[format] * bound).all()


@pytest.mark.parametrize("format", PACKINGS)
def test_stored_shapes_are_those_of_the_table(format: WeightFormat) -> None:
    codes, scales = encode(format, levelled(96, 160))
    assert codes.shape == PACKINGS[format].code_shape((96, 160))
    assert scales.shape == PACKINGS[format].scale_shape((96, 160))
    assert codes.dtype == scales.dtype == torch.uint8


@pytest.mark.parametrize(
    ("format", "shape"),
    [(WeightFormat.FP8_BLOCK32, (40, 72)), (WeightFormat.FP8_BLOCK128, (192, 320))],
)
def test_partial_edge_tiles_have_a_scale_of_their_own(
    format: WeightFormat, shape: tuple[int, int]
) -> None:
    values = levelled(*shape)
    codes, scales = encode(format, values)
    assert scales.shape == (2, 3)
    coarse = values.abs().max() * 2.0**-17  # half a step of the smallest codes
    assert torch.allclose(decode(format, codes, scales), values, rtol=1 / 16, atol=float(coarse))


@pytest.mark.parametrize("format", PACKINGS)
def test_a_cut_decodes_to_the_same_part_of_the_whole(format: WeightFormat) -> None:
    codes, scales = encode(format, levelled(256, 320))
    part = (slice(128, 256), slice(128, 320))
    code_cut, scale_cut = PACKINGS[format].cut((256, 320), part)
    cut = decode(format, codes[code_cut], scales[scale_cut])
    assert torch.equal(cut, decode(format, codes, scales)[part])


def test_a_cut_inside_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scale blocks of 32 cannot be cut at 16:48"):
        PACKINGS[WeightFormat.FP8_BLOCK32].cut((96, 160), (slice(16, 48), slice(None)))


def levelled(rows: int, cols: int) -> Tensor:
    """Random values whose level differs by octaves from tile to tile."""
    levels = torch.exp2(torch.randint(-6, 7, (-(-rows // 32), -(-cols // 32))).float())
    levels = levels.repeat_interleave(32, 0).repeat_interleave(32, 1)
    return torch.randn(rows, cols) * levels[:rows, :cols]
