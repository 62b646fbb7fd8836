"""V4's tensor table against the published totals and the golden checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from leadline.config.families import load_any_config
from leadline.config.presets import any_preset
from leadline.config.v4_presets import TINY_V4, V4_FLASH, V4_PRO_0813
from leadline.weights.checkpoint import Checkpoint
from leadline.weights.names import expected_tensors, model_weights
from leadline.weights.table import Part, TensorSpec


@pytest.fixture(scope="module")
def flash() -> dict[str, TensorSpec]:
    return expected_tensors(V4_FLASH)


@pytest.fixture(scope="module")
def pro() -> dict[str, TensorSpec]:
    return expected_tensors(V4_PRO_0813)


@pytest.mark.parametrize(
    ("name", "count", "nbytes", "backbone", "backbone_bytes"),
    [
        ("v4-flash", 69_187, 159_609_485_896, 67_612, 156_015_698_140),
        ("v4-flash-0731", 72_317, 166_878_536_440, 67_612, 156_015_698_140),
        ("v4-pro", 145_116, 864_704_792_696, 142_773, 850_748_205_004),
        ("v4-pro-0813", 149_782, 892_727_580_904, 142_773, 850_748_205_004),
    ],
)
def test_published_counts_and_bytes(
    name: str, count: int, nbytes: int, backbone: int, backbone_bytes: int
) -> None:
    """v4-model 7.1; those of 0731 and 0813 are in the official index files."""
    tensors = expected_tensors(any_preset(name)).values()
    assert (len(tensors), sum(t.nbytes for t in tensors)) == (count, nbytes)
    used = [t.nbytes for t in tensors if t.part is Part.BACKBONE]
    assert (len(used), sum(used)) == (backbone, backbone_bytes)


@pytest.mark.parametrize("prefix", ["layers.3.ffn.experts.7.", "mtp.0.ffn.experts.0."])
def test_one_expert_has_the_published_bytes(flash: dict[str, TensorSpec], prefix: str) -> None:
    expert = [t.nbytes for name, t in flash.items() if name.startswith(prefix)]
    assert (len(expert), sum(expert)) == (6, 13_369_344)


def test_tiny_has_the_tensors_of_its_specification() -> None:
    """v4-model 11: 509 of the backbone, and 241 (DSpark) or 87 (MTP) of the draft."""
    assert len(expected_tensors(TINY_V4)) == 509 + 241
    mtp = replace(TINY_V4, dspark_block_size=0, dspark_target_layer_ids=(), dspark_markov_rank=0)
    assert len(expected_tensors(mtp)) == 509 + 87


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("layers.0.hc_attn_fn", (24, 28672), "F32"),
        ("layers.5.attn.wo_a.weight", (16384, 4096), "F8_E4M3"),
        ("layers.5.attn.wo_a.scale", (128, 32), "F8_E8M0"),
        ("layers.2.attn.compressor.wgate.weight", (1024, 7168), "BF16"),
        ("layers.2.attn.compressor.ape", (4, 1024), "F32"),
        ("layers.3.attn.compressor.ape", (128, 512), "F32"),
        ("layers.2.attn.indexer.compressor.wkv.weight", (256, 7168), "BF16"),
        ("layers.2.attn.indexer.wq_b.scale", (64, 12), "F8_E8M0"),
        ("layers.2.ffn.gate.tid2eid", (129280, 6), "I64"),
        ("layers.3.ffn.gate.bias", (384,), "F32"),
        ("layers.60.ffn.experts.383.w2.weight", (7168, 1536), "I8"),
        ("layers.60.ffn.experts.383.w2.scale", (7168, 96), "F8_E8M0"),
        ("hc_head_scale", (1,), "F32"),
        ("mtp.0.main_proj.scale", (56, 168), "F8_E8M0"),
        ("mtp.2.markov_head.markov_w1.weight", (129280, 512), "BF16"),
        ("mtp.2.confidence_head.proj.weight", (1, 7680), "BF16"),
    ],
)
def test_official_shapes_and_types(
    pro: dict[str, TensorSpec], name: str, shape: tuple[int, ...], dtype: str
) -> None:
    assert (pro[name].shape, pro[name].dtype) == (shape, dtype)


def test_tables_of_tokens_take_the_place_of_biases(pro: dict[str, TensorSpec]) -> None:
    """In the first layers; draft stages are never routed by them."""
    layers = [name.split(".")[1] for name in pro if name.endswith("tid2eid")]
    assert layers == ["0", "1", "2"]
    assert not any(f"layers.{i}.ffn.gate.bias" in pro for i in range(3))
    assert "mtp.0.ffn.gate.bias" in pro


def test_golden_checkpoint_is_listed_tensor_by_tensor(golden: Path) -> None:
    """It is unquantised: of every weight the values, under the official name."""
    weights = model_weights(load_any_config(golden / "v4-tiny"))
    found = Checkpoint(golden / "v4-tiny").entries
    assert weights.keys() == found.keys()
    for name, weight in weights.items():
        assert found[name].shape == weight.shape, name
        if weight.dtype in ("F32", "I64", "BF16"):
            assert found[name].dtype == weight.dtype, name
