"""Presets: official numbers, and tables that follow from the primes."""

from __future__ import annotations

import math

import pytest

from leadline.config.families import any_config_to_json, parse_any_config
from leadline.config.model import LayerMode
from leadline.config.presets import PRESETS, V41_PRESETS, any_preset, preset
from leadline.core.errors import ConfigError


def next_primes(start: int, count: int) -> list[int]:
    """The first primes at or above ``start``."""
    primes: list[int] = []
    candidate = start
    while len(primes) < count:
        if all(candidate % d for d in range(2, math.isqrt(candidate) + 1)):
            primes.append(candidate)
        candidate += 1
    return primes


@pytest.mark.parametrize("name", PRESETS)
def test_preset_survives_its_own_config_file(name: str) -> None:
    config = any_preset(name)
    assert parse_any_config(any_config_to_json(config)) == config


@pytest.mark.parametrize("name", V41_PRESETS)
def test_engram_rows_are_the_sums_of_the_primes(name: str) -> None:
    config = preset(name)
    layers, columns = len(config.engram_layer_ids), config.engram_columns
    primes = next_primes(config.engram_vocab_size, layers * columns)
    sums = [sum(primes[i * columns : (i + 1) * columns]) for i in range(layers)]
    assert list(config.engram_num_embeddings) == sums


def test_official_preset_has_the_layers_of_the_official_table() -> None:
    config = preset("v4.1-flash")
    full = [i for i in range(40) if config.mode(i) is LayerMode.FULL]
    reindex = [i for i in range(40) if config.mode(i) is LayerMode.REINDEX]
    assert (full, reindex, config.cut) == ([2, 8, 14, 20], [24, 28, 32, 36], 20)
    assert (config.kv_source(39), config.index_source(39)) == (20, 36)


@pytest.mark.parametrize(
    ("whole", "slice"), [("v4.1-flash", "slice-96"), ("v4-flash", "v4-flash-slice")]
)
def test_slice_has_official_widths_and_a_quarter_of_the_experts(whole: str, slice: str) -> None:
    official, part = any_preset(whole), any_preset(slice)
    assert part.n_routed_experts * 4 == official.n_routed_experts
    for key in ("hidden_size", "num_hidden_layers", "moe_intermediate_size", "head_dim"):
        assert getattr(part, key) == getattr(official, key)


def test_slice_needs_no_token_map() -> None:
    part = preset("slice-96")
    # As many classes as tokens.
    assert part.engram_compressed_vocab_size == part.vocab_size


def test_test_preset_has_the_official_window_and_32k_positions() -> None:
    config = preset("tiny-window128")
    assert (config.sliding_window, config.max_position_embeddings) == (128, 32768)
    assert {config.mode(i) for i in range(config.num_hidden_layers)} == set(LayerMode)


def test_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"preset is 'v5'; choose one of v4.1-flash, .*, v4-pro"):
        any_preset("v5")
    with pytest.raises(ConfigError, match=r"'v4-pro'; choose one of v4.1-flash, slice-96, .*22m$"):
        preset("v4-pro")
