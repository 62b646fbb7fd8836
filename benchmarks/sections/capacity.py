"""Cache memory of one long session, as the device counts it: FP4 records beside FP8 ones.

A pool with room for so many sessions is allocated, and one with room for none; what a session adds
is the difference. Records of peers are computed from their published sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.sections.section import Bench, Case, Section, Table
from leadline.cache.layout import CacheLayout, cache_layout
from leadline.cache.pool import CachePool
from leadline.cache.sizing import pages_of

TOKENS, SESSIONS = 100_000, 16
QUICK_TOKENS, QUICK_SESSIONS = 1000, 2

# Bytes of an entry and of its index key (cache-and-scheduling 1.2).
PEERS = {"584 B records, FP8 index keys": 584 + 132, "584 B records, FP4 index keys": 584 + 68}


def measured_bytes(layout: CacheLayout, pages: int, slots: int, device: torch.device) -> int:
    """What a pool takes of the device's memory; on a CPU, what its tensors have."""
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    pool = CachePool(
        layout,
        num_pages=1 + pages,
        num_slots=1 + slots,
        step_rows=0,
        wide=torch.float32,
        device=device,
    )
    return torch.cuda.memory_allocated() - before if device.type == "cuda" else pool.num_bytes


def cases(bench: Bench) -> Iterator[Case]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens, sessions = (QUICK_TOKENS, QUICK_SESSIONS) if bench.quick else (TOKENS, SESSIONS)
    for dtype in ("nvfp4_ds_mla", "fp8"):
        layout = cache_layout(bench.model, kv_cache_dtype=dtype)
        num_pages = pages_of(tokens, layout.page_size)
        empty = measured_bytes(layout, 0, 0, device)
        pages = measured_bytes(layout, sessions * num_pages, 0, device) - empty
        slots = measured_bytes(layout, 0, sessions, device) - empty
        yield {
            "records": dtype,
            "tokens": tokens,
            "sessions": sessions,
            "pages_bytes": pages / sessions,
            "slot_bytes": slots / sessions,
            "bytes_per_token": layout.bytes_per_token,
        }
    entries = sum(1 / owner.ratio for owner in layout.owners)
    for name, entry_bytes in PEERS.items():
        per_token = entries * entry_bytes
        yield {
            "records": name,
            "tokens": tokens,
            "pages_bytes": per_token * tokens,
            "bytes_per_token": per_token,
        }


def table(found: Sequence[Case]) -> Table:
    first = found[0]["pages_bytes"]
    rows = [
        (
            case["records"] + ("" if "sessions" in case else ", computed"),
            f"{case['bytes_per_token']:,.0f}",
            f"{case['pages_bytes'] / 1e6:,.1f}",
            f"{case['slot_bytes'] / 1e6:,.1f}" if "slot_bytes" in case else "",
            f"{case['pages_bytes'] / first:.2f}",
        )
        for case in found
    ]
    tokens = found[0]["tokens"]
    header = ("records", "B a token", f"pages of {tokens:,} tokens, MB", "slot, MB", "beside FP4")
    return header, rows


SECTION = Section("Cache of one session", cases, table)
