from __future__ import annotations

from dataclasses import replace

import pytest

from leadline.cache.layout import CacheLayout, OpenGroup, Owner
from leadline.cache.sizing import CacheSize, longest_model_len, pages_of, size_cache
from leadline.core.errors import ConfigError
from leadline.kernels.records import Record

PAGE_SIZE = 256
LAYOUT = CacheLayout(
    page_size=PAGE_SIZE,
    owners=(Owner(0, 1),),
    head_dim=64,
    index_head_dim=32,
    window=128,
    ring=160,
    window_layers=2,
    window_record=Record.FP8_32,
    kv_record=Record.FP4_16,
    index_record=Record.FP4_32,
)
PAGE, SLOT = LAYOUT.page_bytes, LAYOUT.slot_bytes


@pytest.mark.parametrize(
    ("num_tokens", "num_pages"), [(0, 0), (1, 1), (256, 1), (257, 2), (512, 2)], ids=str
)
def test_pages_of_counts_started_pages(num_tokens: int, num_pages: int) -> None:
    assert pages_of(num_tokens, 256) == num_pages


def test_a_large_budget_gives_every_slot_and_spends_the_rest_on_pages() -> None:
    budget = 9 * SLOT + 1000 * PAGE + PAGE - 1
    size = size_cache(LAYOUT, budget_bytes=budget, max_num_seqs=8, max_model_len=4096)
    assert size == CacheSize(num_pages=1000, num_slots=9, page_size=PAGE_SIZE)
    assert size.num_bytes(LAYOUT) <= budget


def test_a_short_budget_gives_fewer_slots_and_keeps_half_for_pages() -> None:
    budget = 2 * SLOT + 5 * PAGE + 7 * SLOT
    size = size_cache(LAYOUT, budget_bytes=budget, max_num_seqs=64, max_model_len=4 * PAGE_SIZE)
    assert size.num_slots == 2 + 3
    assert size.num_pages > 5
    assert size.num_bytes(LAYOUT) <= budget


def test_exactly_one_request_fits_at_the_edge() -> None:
    budget = 2 * SLOT + 5 * PAGE
    assert longest_model_len(LAYOUT, budget) == 4 * PAGE_SIZE
    size = size_cache(LAYOUT, budget_bytes=budget, max_num_seqs=64, max_model_len=4 * PAGE_SIZE)
    assert size == CacheSize(num_pages=5, num_slots=2, page_size=PAGE_SIZE)


@pytest.mark.parametrize("short_by", [1, PAGE], ids=["one byte", "one page"])
def test_too_long_a_model_len_is_told_the_longest_that_fits(short_by: int) -> None:
    budget = 2 * SLOT + 5 * PAGE - short_by
    with pytest.raises(ConfigError, match=r"max_model_len is 1024.*lower max_model_len to 768 "):
        size_cache(LAYOUT, budget_bytes=budget, max_num_seqs=4, max_model_len=1024)


def test_a_budget_below_one_slot_says_that_no_length_fits() -> None:
    with pytest.raises(ConfigError, match="the budget is 1000 bytes; no length fits"):
        size_cache(LAYOUT, budget_bytes=1000, max_num_seqs=4, max_model_len=1024)


def test_snapshots_take_their_share_of_what_one_request_leaves() -> None:
    budget = 2 * SLOT + 5 * PAGE + 100 * SLOT
    size = size_cache(
        LAYOUT,
        budget_bytes=budget,
        max_num_seqs=8,
        max_model_len=4 * PAGE_SIZE,
        snapshot_memory_fraction=0.2,
    )
    assert (size.num_slots, size.num_snapshots, size.num_slot_rows) == (9, 20, 29)
    assert budget - PAGE < size.num_bytes(LAYOUT) <= budget


def test_snapshots_are_counted_by_what_they_hold_of_a_slot() -> None:
    owner = Owner(0, 16, open_kv=OpenGroup(rows=24, width=128))
    layout = replace(LAYOUT, owners=(owner,))
    assert layout.slot_bytes - layout.snapshot_bytes == 24 * 128 * 4
    least = CacheSize(num_pages=5, num_slots=2, page_size=PAGE_SIZE).num_bytes(layout)
    size = size_cache(
        layout,
        budget_bytes=least + 100 * layout.snapshot_bytes,
        max_num_seqs=1,
        max_model_len=4 * PAGE_SIZE,
        snapshot_memory_fraction=0.5,
    )
    assert size.num_snapshots == 50
    assert size.num_bytes(layout) <= least + 100 * layout.snapshot_bytes


def test_one_request_fits_whatever_snapshots_may_take() -> None:
    size = size_cache(
        LAYOUT,
        budget_bytes=2 * SLOT + 5 * PAGE,
        max_num_seqs=8,
        max_model_len=4 * PAGE_SIZE,
        snapshot_memory_fraction=0.9,
    )
    assert size == CacheSize(num_pages=5, num_slots=2, page_size=PAGE_SIZE)
