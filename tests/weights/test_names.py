"""The tensor table against the official totals and the golden checkpoints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from leadline.config.model import load_model_config
from leadline.config.presets import preset
from leadline.weights.checkpoint import Checkpoint
from leadline.weights.names import (
    expected_tensors,
    model_weights,
    vision_totals,
)
from leadline.weights.table import Part, Role, TensorSpec


@pytest.fixture(scope="module")
def official() -> dict[str, TensorSpec]:
    return expected_tensors(preset("v4.1-flash"))


def test_official_counts_and_bytes(official: dict[str, TensorSpec]) -> None:
    parts = Counter(tensor.part for tensor in official.values())
    vision_count, vision_bytes = vision_totals(preset("v4.1-flash"))
    assert (parts[Part.BACKBONE], parts[Part.DRAFT], vision_count) == (93_418, 2_401, 266)
    assert len(official) + vision_count == 96_085
    total = sum(tensor.nbytes for tensor in official.values()) + vision_bytes
    assert total == 510_286_023_000


def test_one_official_expert_has_18_800_640_bytes(official: dict[str, TensorSpec]) -> None:
    expert = [t for name, t in official.items() if name.startswith("layers.3.ffn.experts.7.")]
    assert len(expert) == 6
    assert sum(tensor.nbytes for tensor in expert) == 18_800_640


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("layers.0.hc_attn_fn", (24, 20480), "F32"),
        ("layers.5.attn.wo_a.scale", (256, 128), "F8_E8M0"),
        ("layers.2.attn.compressor.wgate.weight", (512, 5120), "BF16"),
        ("layers.1.engram.embed.weight", (384006168, 256), "F8_E4M3"),
        ("layers.1.engram.embed.scale", (384006168, 8), "F8_E8M0"),
        ("layers.14.engram.wkv.scale", (800, 192), "F8_E8M0"),
        ("layers.39.ffn.experts.383.w2.weight", (5120, 1152), "I8"),
        ("layers.39.ffn.experts.383.w2.scale", (5120, 72), "F8_E8M0"),
        ("mtp.0.main_proj.scale", (160, 480), "F8_E8M0"),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16"),
    ],
)
def test_official_shapes_and_types(
    official: dict[str, TensorSpec], name: str, shape: tuple[int, ...], dtype: str
) -> None:
    tensor = official[name]
    assert (tensor.shape, tensor.dtype) == (shape, dtype)


def test_a_ratio_1_source_has_no_gate() -> None:
    names = model_weights(preset("v4.1-flash"))
    gates = [name for name in names if name.endswith("wgate.weight")]
    assert gates == [f"layers.{i}.attn.compressor.wgate.weight" for i in (2, 8, 14)]


def test_22m_preset_has_the_parameters_of_its_specification() -> None:
    weights = model_weights(preset("tiny-22m")).values()
    backbone = sum(w.num_parameters for w in weights if w.part is Part.BACKBONE)
    tables = sum(w.num_parameters for w in weights if w.role is Role.ENGRAM_TABLE)
    total = sum(w.num_parameters for w in weights)
    assert tables == 32 * (49796 + 50980)
    assert backbone == pytest.approx(19.2e6, rel=0.01)
    assert total == pytest.approx(21.7e6, rel=0.01)


def test_reference_checkpoint_is_listed_tensor_by_tensor(golden: Path) -> None:
    folder = golden / "v41-reference"
    expected = expected_tensors(load_model_config(folder))
    found = Checkpoint(folder).entries
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        assert found[name].nbytes == tensor.nbytes
