from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from leadline.cache.layout import OpenGroup, cache_layout
from leadline.cache.pool import CachePool
from leadline.cache.sizing import CacheSize
from leadline.config.families import load_any_config
from leadline.config.presets import any_preset, preset
from leadline.config.v4 import V4Config
from leadline.config.v4_presets import TINY_V4, V4_FLASH_0731, V4_PRO, V4_PRO_0813
from leadline.core.errors import ConfigError
from leadline.kernels.records import Record

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


@pytest.mark.parametrize(
    ("name", "block_size"), [("tiny-window128", 16), ("tiny-window128", 256), ("tiny-v4", 256)]
)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "bfloat16", "float32"])
def test_tensors_are_as_large_as_the_layout_says(
    kv_cache_dtype: str, name: str, block_size: int
) -> None:
    """Invariant 7 of cache-and-scheduling."""
    config = any_preset(name)
    layout = cache_layout(config, kv_cache_dtype=kv_cache_dtype, block_size=block_size)
    pool = CachePool(layout, num_pages=5, num_slots=7, num_snapshots=4, step_rows=200)
    size = CacheSize(num_pages=5, num_slots=3, page_size=block_size, num_snapshots=4)
    assert pool.num_bytes == size.num_bytes(layout) + layout.staging_bytes(200)


@pytest.mark.parametrize(
    ("config", "page", "slot"),
    [(V4_FLASH_0731, 899_648, 18_880_000), (V4_PRO_0813, 1_288_048, 28_164_096)],
    ids=["flash", "pro"],
)
def test_page_and_slot_of_v4(config: V4Config, page: int, slot: int) -> None:
    """The page of ``--kv-cache-dtype auto``; cache-and-scheduling 1.3, with three stages."""
    layout = cache_layout(config, with_draft=True)
    assert (layout.page_bytes, layout.slot_bytes) == (page, slot)
    assert layout.snapshot_bytes < 0.45 * slot
    assert cache_layout(config, with_draft=True, kv_cache_dtype="fp8") == layout


@pytest.mark.parametrize(
    ("kv_cache_dtype", "gib"), [("bfloat16", 9.62), ("fp8_ds_mla", 4.92), ("float32", 19.25)]
)
def test_a_million_tokens_of_v4_pro(kv_cache_dtype: str, gib: float) -> None:
    """9.62 GiB is the published figure; windows are part of it."""
    layout = cache_layout(V4_PRO, kv_cache_dtype=kv_cache_dtype)
    assert round(layout.sequence_bytes(1 << 20) / 2**30, 2) == gib


def test_a_v4_page_holds_64_and_2_entries_and_slots_the_open_groups() -> None:
    """Rings: cache-and-scheduling 1.3 and 1.4."""
    layout = cache_layout(V4_PRO)
    dense, sparse = layout.owners[1], layout.owners[2]
    assert (layout.entries_per_page(sparse), layout.entries_per_page(dense)) == (64, 2)
    assert (sparse.has_index, dense.has_index) == (True, False)
    assert sparse.open_kv == OpenGroup(rows=16, width=2048, overlaps=True)
    assert sparse.open_index == OpenGroup(rows=16, width=512, overlaps=True)
    assert (dense.open_kv, dense.open_index) == (OpenGroup(rows=136, width=1024), None)


@pytest.mark.parametrize("rows_per_decode", [1, 6, 17])
@pytest.mark.parametrize("name", ["v4.1-flash", "v4-pro"])
def test_rings_outlast_the_longest_step(name: str, rows_per_decode: int) -> None:
    """cache-and-scheduling 1.4: no row is overwritten while an entry may need it."""
    layout = cache_layout(any_preset(name), rows_per_decode=rows_per_decode)
    assert layout.ring >= layout.window + 2 * rows_per_decode
    for owner in layout.owners:
        if owner.open_kv is not None:
            span = 2 * owner.ratio if owner.open_index else owner.ratio
            assert owner.open_kv.rows >= span - 1 + rows_per_decode
        if owner.open_index is not None:
            assert owner.open_index.rows >= owner.ratio + 2 * rows_per_decode


def test_snapshots_of_v4_have_open_rows_of_entries_that_overlap_alone() -> None:
    """At the border of a page the groups of 128 tokens are closed (cache-and-scheduling 1.5)."""
    layout = cache_layout(TINY_V4)
    pool = CachePool(layout, num_pages=2, num_slots=3, num_snapshots=1, step_rows=8)
    dense = [pool.open_groups[layer] for layer in (2, 4)]
    sparse = [*(pool.open_groups[layer] for layer in (1, 3, 5)), *pool.open_index_groups.values()]
    assert [len(rows) for rows in dense] == [2] * 2
    assert [len(rows) for rows in sparse] == [3] * 6
    for tensor in sparse:
        tensor[1].normal_()
    pool.copy_slots([(1, 2)])
    for tensor in sparse:
        assert torch.equal(tensor[1], tensor[2])
    assert layout.slot_bytes - layout.snapshot_bytes == 2 * dense[0][0].nbytes


@pytest.mark.parametrize(
    ("kv_cache_dtype", "message"),
    [("nvfp4_ds_mla", "choose one of auto, fp8_ds_mla, bfloat16, float32"), ("int4", "'int4'")],
)
def test_records_of_another_model_are_refused(kv_cache_dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cache_layout(TINY_V4, kv_cache_dtype=kv_cache_dtype)


def test_widths_without_packed_records_are_plain_or_refused(golden: Path) -> None:
    config = load_any_config(golden / "v4-tiny")
    assert cache_layout(config).kv_record is Record.BFLOAT16
    with pytest.raises(ConfigError, match=r"this model has 48 \(head_dim - qk_rope_head_dim\)"):
        cache_layout(config, kv_cache_dtype="fp8_ds_mla")


def test_a_v4_page_holds_whole_entries() -> None:
    with pytest.raises(ConfigError, match=r"block_size is 64 tokens.* multiple of 128"):
        cache_layout(TINY_V4, block_size=64)
