"""Fused kernels by what they fuse: each group can be turned off, to measure what it brings."""

from __future__ import annotations

from collections.abc import Mapping

from leadline.config.checks import some_of

FUSIONS: Mapping[str, tuple[str, ...]] = {
    "mhc": ("mhc_coefficients", "mhc_enter", "mhc_expand", "mhc_head", "mhc_seam"),
    "gate": ("route", "hash_route"),
    "insert": ("norm_rotate_store", "norm_query_store_window"),
    "window": ("rope_angles", "plan_window", "commit_window"),
    "compressor": ("store_entries", "store_index_keys"),
    # Off, every index layer scores all entries.
    "indexer": (
        "prepare_index_query",
        "quantize_index_query",
        "candidate_logits",
        "select_top_k",
        "select_candidate_blocks",
        "select_from_candidates",
    ),
    "attention": ("sparse_attention",),
    "wo_a": ("output_projection",),
    "engram": ("engram_history", "engram_hash", "engram_inject"),
    "sampling": ("apply_bitmask", "apply_penalties", "greedy", "logprobs", "sample"),
}
"""The ops of each group. Products of weights are in none, nor the scores of all entries: their
separate steps would expand whole matrices and caches."""

FUSED = frozenset(name for group in FUSIONS.values() for name in group)
"""Ops of all groups."""


def separate(wanted: str) -> frozenset[str]:
    """Ops that a setting wants as separate steps.

    Args:
        wanted: the groups that stay, as ``config.checks.some_of`` reads them.

    Raises:
        ConfigError: there is no such group.
    """
    kept = some_of("fusions", wanted, FUSIONS)
    return FUSED.difference(*(FUSIONS[name] for name in kept))
