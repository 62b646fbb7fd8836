from __future__ import annotations

import logging

import pytest

from leadline.cache.layout import cache_layout
from leadline.cache.pool import CachePool
from leadline.config.presets import preset
from leadline.core.errors import ConfigError

FLASH = preset("v4.1-flash")


@pytest.mark.parametrize(
    ("kv_cache_dtype", "bytes_per_token"),
    [("auto", 890), ("nvfp4_ds_mla", 890), ("fp8", 1490), ("bfloat16", 3200), ("float32", 6400)],
)
def test_bytes_per_token_of_v41_flash(kv_cache_dtype: str, bytes_per_token: int) -> None:
    """kernels.md 0.2 asks for exactly 890; 2.5 entries a token in every format."""
    layout = cache_layout(FLASH, kv_cache_dtype=kv_cache_dtype)
    assert layout.bytes_per_token == bytes_per_token


def test_page_and_slot_of_v41_flash() -> None:
    """cache-and-scheduling 1.2 and 1.3, the slot with its three draft stages."""
    layout = cache_layout(FLASH, with_draft=True)
    assert layout.page_bytes == 227_840
    assert layout.ring == 160
    assert layout.slot_bytes == 3_730_944


def test_the_peers_name_for_8_bit_records_means_ours_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        layout = cache_layout(FLASH, kv_cache_dtype="fp8_ds_mla")
    assert layout == cache_layout(FLASH, kv_cache_dtype="fp8")
    assert "fp8_ds_mla means fp8" in caplog.text


def test_unknown_records_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int4'; choose one of auto, nvfp4"):
        cache_layout(FLASH, kv_cache_dtype="int4")


@pytest.mark.parametrize("block_size", [0, 8, 24, 100])
def test_a_page_holds_whole_entries(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"block_size is {block_size} tokens.* multiple of 16"):
        cache_layout(FLASH, block_size=block_size)


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "bfloat16", "float32"])
def test_tensors_are_as_large_as_the_layout_says(kv_cache_dtype: str, block_size: int) -> None:
    """Invariant 7 of cache-and-scheduling."""
    config = preset("tiny-window128")
    layout = cache_layout(config, kv_cache_dtype=kv_cache_dtype, block_size=block_size)
    pool = CachePool(layout, num_pages=5, num_slots=3, step_rows=200)
    slots = 3 * layout.slot_bytes + layout.staging_bytes(200)
    assert pool.num_bytes == 5 * layout.page_bytes + slots
