"""Presets: what each sets, and that what is given wins."""

from __future__ import annotations

from typing import Any

import pytest

from leadline.config.args import FlagParser, settings
from leadline.config.engine import EngineConfig
from leadline.config.optimization import OPTIMIZATIONS, make_engine_config
from leadline.core.errors import ConfigError
from leadline.offline.options import read_options

SWITCHES = {  # of agentic-benchmark 12: by the flag, the defaults and what day0 has
    "swa_bounded_replay": (None, False),
    "kv_cache_dtype": ("auto", "fp8"),
    "fusions": ("all", "none"),
    "side_streams": ("all", "none"),
    "engram_prefetch": (True, False),
    "cuda_graphs": ("auto", "auto-decode"),
    "async_scheduling": (None, False),
}


def values_of(config: EngineConfig) -> dict[str, Any]:
    """By name, of all leaves."""
    parts = (config, config.cache, config.scheduler)
    return {
        setting.name: getattr(part, setting.name)
        for setting in settings(EngineConfig)
        for part in parts
        if hasattr(part, setting.name)
    }


@pytest.mark.parametrize("place", [0, 1], ids=["all", "day0"])
def test_a_preset_sets_this_and_nothing_else(place: int) -> None:
    name = ("all", "day0")[place]
    plain = values_of(EngineConfig(model="m"))
    found = values_of(make_engine_config({"model": "m", "optimization": name}))
    wanted = {switch: values[place] for switch, values in SWITCHES.items()}
    assert found == plain | wanted | {"optimization": name}


def test_presets_are_those_that_the_setting_takes() -> None:
    for name in OPTIMIZATIONS:
        assert EngineConfig(model="m", optimization=name)
    with pytest.raises(ConfigError, match="optimization is 'day1'; choose one of all, day0"):
        make_engine_config({"model": "m", "optimization": "day1"})


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ("--fusions all,-gate", {"fusions": "all,-gate"}),
        ("--swa-bounded-replay", {"swa_bounded_replay": True}),
        ("--swa-replay-upper", {"swa_replay_upper": True}),
        ("--side-streams indexer", {"side_streams": "indexer"}),
        ("--engram-prefetch", {"engram_prefetch": True}),
        ("--cuda-graphs lower", {"cuda_graphs": "lower"}),
        ("--enforce-eager", {"cuda_graphs": "off"}),
        ("--async-scheduling", {"async_scheduling": True}),
        ("--kv-cache-dtype nvfp4_ds_mla", {"kv_cache_dtype": "nvfp4_ds_mla"}),
    ],
    ids=str,
)
def test_a_flag_wins_over_the_preset(flags: str, changed: dict[str, Any]) -> None:
    """One optimisation added to the plainest engine."""
    day0 = values_of(make_engine_config({"model": "m", "optimization": "day0"}))
    parser = FlagParser("leadline serve", "[MODEL]", "Serve.", [EngineConfig])
    values, _ = parser.parse([*flags.split(), "--optimization", "day0"], {})
    assert values_of(make_engine_config({"model": "m", **values})) == day0 | changed


def test_the_offline_engine_takes_presets_too() -> None:
    config, _ = read_options("m", {"optimization": "day0", "side_streams": "all"})
    assert (config.fusions, config.side_streams) == ("none", "all")
