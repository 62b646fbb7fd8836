"""Random weights: reproducible one by one, with scales that differ from block to block."""

from __future__ import annotations

import pytest
import torch

import leadline.weights.random_init
from leadline.config.presets import preset
from leadline.config.v4_presets import TINY_V4
from leadline.weights.formats import decode
from leadline.weights.names import model_weights
from leadline.weights.random_init import random_bytes, random_tensors
from leadline.weights.table import WeightSpec

# Of one name the V4.1's; only V4 has an indexer in layer 1.
WEIGHTS = model_weights(TINY_V4) | model_weights(preset("tiny-window128"))
BLOCK128 = "layers.1.attn.indexer.wq_b"
PACKED = ["layers.0.attn.wq_b", "layers.0.ffn.experts.0.w1", "layers.1.engram.embed", BLOCK128]


def weight(stem: str) -> WeightSpec:
    return WEIGHTS[f"{stem}.weight"]


@pytest.mark.parametrize("stem", [*PACKED, "layers.0.ffn.gate"])
def test_a_weight_follows_from_seed_and_name(stem: str) -> None:
    first = random_tensors(weight(stem), seed=3)
    torch.randn(5)  # the global generator plays no part
    again = random_tensors(weight(stem), seed=3)
    other = random_tensors(weight(stem), seed=4)
    name = f"{stem}.weight"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[name], other[name])


def test_weights_of_one_shape_differ() -> None:
    first, second = (random_tensors(weight(f"layers.{i}.attn.wq_a"), seed=0) for i in (0, 1))
    assert not torch.equal(first["layers.0.attn.wq_a.weight"], second["layers.1.attn.wq_a.weight"])


@pytest.mark.parametrize("stem", PACKED)
def test_neighbouring_scales_differ(stem: str) -> None:
    scales = random_tensors(weight(stem), seed=0)[f"{stem}.scale"]
    assert len(scales.unique()) >= min(3, scales.numel() // 2)


@pytest.mark.parametrize("in_place", [False, True], ids=["encoded", "drawn in place"])
def test_a_table_of_tokens_names_different_experts(in_place: bool) -> None:
    spec = WEIGHTS["layers.0.ffn.gate.tid2eid"]
    if in_place:
        made = random_bytes(spec, seed=5, device=torch.device("cpu"))
    else:
        made = random_tensors(spec, seed=5)
    table = made[spec.name]
    assert (table.dtype, tuple(table.shape)) == (torch.int64, spec.shape)
    assert table.unique().tolist() == list(range(TINY_V4.n_routed_experts))
    assert (table[:, 0] != table[:, 1]).all()


def test_large_weights_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """630 rows of 32 in parts of 64 rows: every row is filled, the last part is short."""
    monkeypatch.setattr(leadline.weights.random_init, "_CHUNK_VALUES", 64 * 32)
    made = random_tensors(weight("layers.1.engram.embed"), seed=0)
    codes = made["layers.1.engram.embed.weight"]
    assert codes.shape == (630, 32)
    assert codes.count_nonzero(dim=1).min() > 16


@pytest.mark.parametrize("stem", PACKED)
def test_bytes_drawn_in_place_have_the_magnitude_of_encoded_weights(stem: str) -> None:
    spec, sizes = weight(stem), []
    for made in (
        random_tensors(spec, seed=5),
        random_bytes(spec, seed=5, device=torch.device("cpu")),
    ):
        values = decode(spec.format, made[f"{stem}.weight"], made[f"{stem}.scale"])
        assert values.isfinite().all()
        sizes.append(values.square().mean().sqrt())
    assert 0.5 < sizes[1] / sizes[0] < 2


@pytest.mark.parametrize("stem", [*PACKED, "layers.0.ffn.gate"])
def test_bytes_drawn_in_place_follow_from_seed_and_name(stem: str) -> None:
    first, again, other = (
        random_bytes(weight(stem), seed=seed, device=torch.device("cpu")) for seed in (3, 3, 4)
    )
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[f"{stem}.weight"], other[f"{stem}.weight"])
