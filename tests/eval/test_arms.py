from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leadline.config.engine import EngineConfig
from leadline.config.families import load_any_config
from leadline.config.model import load_model_config
from leadline.core.errors import ConfigError
from leadline.engine.settings import resolve_policy
from leadline.eval.arms import ARMS, Arm, arm_config, choose_arms, default_arms, parse_arm


def config_of(arm: Arm, **base: Any) -> EngineConfig:
    with arm_config(arm, {"model": "m", **base}) as config:
        return config


@pytest.mark.parametrize(
    ("name", "lower", "upper", "kv_cache_dtype"),
    [
        ("exact", False, False, "float32"),
        ("replay-lower", True, False, "float32"),
        ("replay-upper", False, True, "float32"),
        ("replay-both", True, True, "float32"),
        ("kv-fp8", False, False, "fp8"),
        ("kv-nvfp4", False, False, "nvfp4_ds_mla"),
        ("served", True, True, "auto"),
    ],
)
def test_each_arm_turns_one_switch(
    name: str, lower: bool, upper: bool, kv_cache_dtype: str
) -> None:
    cache = config_of(ARMS[name]).cache
    halves = (cache.swa_replay_lower, cache.swa_replay_upper)
    both = [cache.swa_bounded_replay is not False if half is None else half for half in halves]
    assert (*both, cache.kv_cache_dtype) == (lower, upper, kv_cache_dtype)


def test_settings_of_all_arms_lie_between_the_exact_ones_and_the_arms_own() -> None:
    shared = {"kv_cache_dtype": "bfloat16", "block_size": 32}
    assert config_of(ARMS["exact"], **shared).cache.kv_cache_dtype == "bfloat16"
    assert config_of(ARMS["kv-fp8"], **shared).cache.kv_cache_dtype == "fp8"
    assert config_of(ARMS["kv-fp8"], **shared).cache.block_size == 32


def test_keys_of_the_model_make_a_checkpoint_of_the_same_weights(model: Path) -> None:
    with arm_config(parse_arm("few:index-topk=3"), {"model": str(model)}) as config:
        overlay = Path(config.model)
        assert load_model_config(overlay).index_topk == 3
        same = {file.name for file in model.iterdir()} - {"config.json"}
        for name in same:
            assert (overlay / name).samefile(model / name)
    assert not overlay.exists()
    assert load_model_config(model).index_topk != 3


def test_dense_selects_everything(model: Path) -> None:
    with arm_config(ARMS["dense"], {"model": str(model)}) as config:
        dense = load_model_config(config.model)
    assert dense.index_topk > dense.max_position_embeddings
    assert dense.candidate_topk_blocks > dense.max_position_embeddings


def test_arms_of_a_scale_are_those_that_the_model_can_run(
    random_tiny_v4: Path, random_tiny: Path
) -> None:
    names = ",".join(ARMS)
    assert default_arms(names, load_any_config(random_tiny)) == names
    of_v4 = default_arms(names, load_any_config(random_tiny_v4)).split(",")
    assert of_v4 == ["exact", "kv-fp8", "served"]
    for name in of_v4:
        with arm_config(ARMS[name], {"model": str(random_tiny_v4)}) as config:
            resolve_policy(config.cache, load_any_config(random_tiny_v4))


def test_an_arm_of_a_v4_changes_what_its_config_has(random_tiny_v4: Path) -> None:
    settings = {"model": str(random_tiny_v4)}
    with arm_config(parse_arm("few:index-topk=3"), settings) as config:
        assert load_any_config(config.model).index_topk == 3
    with (
        pytest.raises(ConfigError, match=r"candidate_topk_blocks, which .* does not have"),
        arm_config(ARMS["dense"], settings),
    ):
        pass


def test_an_arm_of_ones_own() -> None:
    arm = parse_arm("long:swa_replay_length=64,swa-bounded-replay=true,kv_cache_dtype=fp8")
    assert arm.name == "long"
    assert arm.changes == {
        "swa_replay_length": 64,
        "swa_bounded_replay": True,
        "kv_cache_dtype": "fp8",
    }


def test_the_reference_comes_first_and_once() -> None:
    names = [arm.name for arm in choose_arms("kv-fp8, exact", ["x:block_size=32"])]
    assert names == ["exact", "kv-fp8", "x"]


@pytest.mark.parametrize(
    ("names", "own", "message"),
    [
        ("replay-bth", [], "arms has 'replay-bth'; did you mean replay-both"),
        ("", ["x"], "arm is 'x'; write it as NAME:SETTING=VALUE"),
        ("", ["x:blok_size=3"], "arm sets 'blok_size=3'; .*did you mean block_size"),
        ("", ["x:block_size=many"], "arm sets block_size: 'many' is not a whole number"),
        ("", ["x:swa_bounded_replay=2"], "arm sets swa_bounded_replay to '2'; write true or"),
        ("served", ["served:block_size=32"], "arm 'served' is named twice"),
    ],
)
def test_a_mistake_is_named(names: str, own: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_arms(names, own)
