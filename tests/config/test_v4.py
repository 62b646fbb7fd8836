"""The flat configuration of V4: official spellings, those of Transformers, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leadline.config.families import load_any_config, parse_any_config
from leadline.config.model import ModelConfig
from leadline.config.presets import V41_PRESETS, any_preset
from leadline.config.v4 import V4Config, V4LayerMode, parse_v4_config, v4_config_to_json
from leadline.config.v4_presets import TINY_V4, V4_FLASH, V4_FLASH_0731, V4_PRO, V4_PRO_0813
from leadline.core.errors import ConfigError, NotSupported

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def raw() -> dict[str, Any]:
    """A good file with a DSpark draft and packed weights."""
    return v4_config_to_json(TINY_V4)


def put(**values: Any) -> Change:
    return lambda raw: raw.update(values)


def put_in(key: str, **values: Any) -> Change:
    return lambda raw: raw[key].update(values)


def drop(*names: str) -> Change:
    return lambda raw: [raw.pop(name) for name in names]


def test_layers_of_flash() -> None:
    """v4-model 1.2."""
    modes = [V4_FLASH.mode(layer) for layer in range(43)]
    assert modes[:4] == [V4LayerMode.WINDOW] * 2 + [V4LayerMode.SPARSE, V4LayerMode.DENSE]
    assert [modes.count(mode) for mode in V4LayerMode] == [2, 21, 20]
    assert modes[42] is V4LayerMode.SPARSE
    assert len(V4_FLASH.compress_ratios) == 44
    assert len(V4_FLASH_0731.compress_ratios) == 46


def test_layers_of_pro() -> None:
    """v4-model 1.2."""
    modes = [V4_PRO.mode(layer) for layer in range(61)]
    assert [modes.count(mode) for mode in V4LayerMode] == [0, 30, 31]
    assert modes[:3] == [V4LayerMode.DENSE] * 2 + [V4LayerMode.SPARSE]
    assert len(V4_PRO.compress_ratios) == 62
    assert len(V4_PRO_0813.compress_ratios) == 64


def test_no_layer_shares_its_cache_or_selection() -> None:
    assert [TINY_V4.kv_source(i) for i in range(6)] == [None, 1, 2, 3, 4, 5]
    assert [TINY_V4.index_source(i) for i in range(6)] == [None, 1, None, 3, None, 5]


@pytest.mark.parametrize(
    ("config", "stages"),
    [(V4_FLASH, 1), (V4_FLASH_0731, 3), (replace(V4_FLASH, num_nextn_predict_layers=0), 0)],
    ids=["MTP", "DSpark", "none"],
)
def test_the_block_size_tells_dspark_from_an_mtp_layer(config: V4Config, stages: int) -> None:
    """num_nextn_predict_layers stays 1 in files with three stages."""
    assert config.num_draft_stages == stages


def test_a_ratio_other_than_4_is_dense() -> None:
    config = replace(TINY_V4, compress_ratios=(0, 4, 16, 4, 16, 4, 0, 0, 0))
    assert config.mode(2) is V4LayerMode.DENSE


def test_golden_file_is_read(golden: Path) -> None:
    config = load_any_config(golden / "v4-tiny")
    assert isinstance(config, V4Config)
    assert config.rope_scaling.rope_type == "yarn"
    assert config.compress_ratios == (0, 0, 4, 128, 4, 128)
    assert (config.num_draft_stages, config.quantization_config) == (0, None)
    assert load_any_config(golden / "v4-tiny/config.json") == config


def test_model_type_chooses_the_model(golden: Path) -> None:
    assert isinstance(load_any_config(golden / "v41-tiny"), ModelConfig)
    for name in V41_PRESETS:
        assert isinstance(any_preset(name), ModelConfig)
    with pytest.raises(
        NotSupported,
        match="model_type is 'llama'; this version serves deepseek_v4 and deepseek_v41",
    ):
        parse_any_config({"model_type": "llama"})
    with pytest.raises(NotSupported, match="model_type is 'llama'"):
        parse_v4_config({"model_type": "llama"})


def test_spellings_of_transformers_mean_the_same() -> None:
    kinds = {
        0: "sliding_attention",
        4: "compressed_sparse_attention",
        128: "heavily_compressed_attention",
    }
    config = V4_FLASH_0731
    raw = v4_config_to_json(config)
    scaling = raw.pop("rope_scaling")
    raw["rope_parameters"] = {
        "main": {"rope_type": "default", "rope_theta": raw.pop("rope_theta")},
        "compress": {
            "rope_type": scaling.pop("type"),
            "rope_theta": raw.pop("compress_rope_theta"),
            **scaling,
        },
    }
    raw["layer_types"] = [kinds[ratio] for ratio in raw.pop("compress_ratios")[:43]]
    raw["compress_rates"] = {kinds[4]: 4, kinds[128]: 128}
    hashed = raw.pop("num_hash_layers")
    raw["mlp_layer_types"] = ["hash_moe"] * hashed + ["moe"] * (43 - hashed)
    raw["quantization_config"]["expert_dtype"] = raw.pop("expert_dtype")
    raw["dtype"] = raw.pop("torch_dtype")
    assert parse_v4_config(json.loads(json.dumps(raw))) == config


# What is wrong, how it gets in, and the message that names it.
BAD: list[tuple[str, Change, str]] = [
    ("a missing key", drop("num_hash_layers"), r"missing key\(s\) num_hash_layers"),
    ("text for a number", put(hidden_size="128"), "hidden_size is '128'; it must be of type int"),
    ("zero", put(sliding_window=0), "sliding_window is 0; it must be positive"),
    ("V4.1's blocks", put_in("quantization_config", weight_block_size=[32, 32]), r"is \[32, 32\]"),
    ("another code", put_in("quantization_config", fmt="e5m2"), "fmt is 'e5m2'; V4 is defined for"),
    ("base weights", put(expert_dtype="fp8"), "expert_dtype is 'fp8'; only 'fp4' is known"),
    ("another rope", put_in("rope_scaling", type="linear"), "rope_type is 'linear'; only 'yarn'"),
    ("half a rope", lambda r: r["rope_scaling"].pop("factor"), "rope_scaling: missing key factor"),
    ("another router", put(topk_method="greedy"), "topk_method is 'greedy'; V4 is defined for"),
    ("a short schedule", put(compress_ratios=[0, 4]), "has 2 entries; num_hidden_layers"),
    ("no entry for a stage", put(compress_ratios=[0, 4, 128, 4, 128, 4, 0]), "need 9"),
    (
        "a draft that compresses",
        put(compress_ratios=[0, 4, 128, 4, 128, 4, 4, 0, 0]),
        "of the draft stages",
    ),
    (
        "a negative ratio",
        put(compress_ratios=[0, -4, 128, 4, 128, 4, 0, 0, 0]),
        r"compress_ratios\[1\] is -4",
    ),
    ("more hash layers than layers", put(num_hash_layers=7), "it must lie in 0..6"),
    ("no power of two", put(index_head_dim=96), "index_head_dim is 96; the Hadamard"),
    ("too wide a rotation", put(qk_rope_head_dim=34), "at most index_head_dim"),
    ("uneven output groups", put(o_groups=3), "not a multiple of o_groups"),
    ("a draft without a rank", put(dspark_markov_rank=0), "dspark_markov_rank must be positive"),
    ("a draft of nothing", put(dspark_target_layer_ids=[]), "dspark_target_layer_ids name layers"),
    ("features from nowhere", put(dspark_target_layer_ids=[3, 4, 9]), "of the backbone"),
    ("targets alone", drop("dspark_block_size"), "is given without dspark_block_size"),
    (
        "two MTP layers",
        lambda r: (
            drop("dspark_block_size", "dspark_target_layer_ids")(r),
            put(num_nextn_predict_layers=2)(r),
        ),
        "V4 has one MTP layer",
    ),
    ("another architecture", put(architectures=["Llama"]), "it must name DeepseekV4ForCausalLM"),
    ("an unknown kind of layer", put(layer_types=["linear"]), "layer_types is"),
    ("kinds that are no list", put(layer_types="moe"), "layer_types is 'moe'"),
    ("hashing in the middle", put(mlp_layer_types=["moe", "hash_moe"]), "mlp_layer_types is"),
    ("no list of experts", put(mlp_layer_types=3), "mlp_layer_types is 3"),
    ("one rotation", put(rope_parameters={"main": {}}), "rope_parameters.compress is None"),
]


@pytest.mark.parametrize(
    ("change", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_a_bad_configuration_gets_one_message_that_names_file_and_key(
    raw: dict[str, Any], change: Change, message: str
) -> None:
    broken = copy.deepcopy(raw)
    change(broken)
    with pytest.raises(ConfigError, match=message) as caught:
        parse_any_config(broken, where="DIR/config.json")
    assert str(caught.value).startswith("DIR/config.json: ")
    assert "\n" not in str(caught.value)
