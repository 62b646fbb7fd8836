"""Which component of ``roofline`` the call of an op belongs to."""

from __future__ import annotations

from leadline.profile.roofline import (
    ATTENTION,
    CANDIDATE_LOGITS,
    DENSE_LOGITS,
    ENGRAM,
    HEAD,
    INDEX_PROJECTIONS,
    PROJECTIONS,
    ROUTED_EXPERTS,
    ROUTER,
    SEAMS,
    SELECTION,
    SHARED_EXPERT,
)

OF_OP = {
    "mhc_coefficients": SEAMS,
    "mhc_collapse": SEAMS,
    "mhc_enter": SEAMS,
    "mhc_expand": SEAMS,
    "mhc_head": SEAMS,
    "mhc_seam": SEAMS,
    "route": ROUTER,
    "hash_route": ROUTER,
    # Norms and stores of rows follow the down-projection, and are counted with it.
    "norm_query_store_window": PROJECTIONS,
    "norm_rotate_store": PROJECTIONS,
    "rms_norm": PROJECTIONS,
    "grouped_linear": PROJECTIONS,
    "output_projection": PROJECTIONS,
    "store_entries": INDEX_PROJECTIONS,
    "store_index_keys": INDEX_PROJECTIONS,
    "prepare_index_query": INDEX_PROJECTIONS,
    "quantize_index_query": INDEX_PROJECTIONS,
    "rotate": INDEX_PROJECTIONS,  # of index queries whose keys are stored plain
    "index_logits": DENSE_LOGITS,
    "candidate_logits": CANDIDATE_LOGITS,
    "select_top_k": SELECTION,
    "select_candidate_blocks": SELECTION,
    "select_from_candidates": SELECTION,
    # Angles and addresses, once a step, are for its sake.
    "rope_angles": ATTENTION,
    "plan_window": ATTENTION,
    "commit_window": ATTENTION,
    "sparse_attention": ATTENTION,
    "pack_rows": ATTENTION,
    "unpack_rows": ATTENTION,
    "store_rows": ATTENTION,
    "routed_experts": ROUTED_EXPERTS,
    "shared_expert": SHARED_EXPERT,
    "engram_history": ENGRAM,
    "engram_hash": ENGRAM,
    "gather_rows": ENGRAM,
    "engram_inject": ENGRAM,
    "apply_bitmask": HEAD,
    "apply_penalties": HEAD,
    "greedy": HEAD,
    "logprobs": HEAD,
    "sample": HEAD,
}

# Products that several parts of a model are made of: by the class that calls them.
OF_CALLER = {
    "linear": {
        "Attention": PROJECTIONS,
        "LatentAttention": PROJECTIONS,
        "Compressor": INDEX_PROJECTIONS,
        "EntryScores": INDEX_PROJECTIONS,
        "Engram": ENGRAM,
    },
    "wide_linear": {"Compressor": INDEX_PROJECTIONS, "Backbone": HEAD},
}


def component_of(op: str, caller: str) -> str:
    """The component of one call.

    Args:
        op: its name in ``kernels.ops``.
        caller: qualified name of the method that calls it.

    Raises:
        KeyError: the tables do not know it.
    """
    if op in OF_CALLER:
        return OF_CALLER[op][caller.partition(".")[0]]
    return OF_OP[op]
