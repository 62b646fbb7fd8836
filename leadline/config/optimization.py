"""Optimisations by preset, so that what all of them bring can be measured in one build."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leadline.config.args import from_values
from leadline.config.engine import EngineConfig

OPTIMIZATIONS: Mapping[str, Mapping[str, Any]] = {
    "all": {},  # the defaults
    "day0": {
        "swa_bounded_replay": False,
        "kv_cache_dtype": "fp8",
        "fusions": "none",
        "side_streams": "none",
        "engram_prefetch": False,
        "cuda_graphs": "auto-decode",
        "async_scheduling": False,
    },
}
"""By preset, the settings that differ from the defaults (agentic-benchmark 12.3)."""


def make_engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """The settings of an engine by their names, those of the preset behind them.

    Args:
        values: what was given; other names than the engine's settings are left alone.

    Raises:
        ConfigError: a value that cannot be used.
    """
    preset = OPTIMIZATIONS.get(values.get("optimization", "all"), {})
    return from_values(EngineConfig, {**preset, **values})
