"""Float32 ops compiled by numba, for steps of few rows and prompts alike.

A decode step of a small model is some hundred ops over a few rows, where torch's time is what its
calls cost and not arithmetic. A kernel here does in one call what takes torch ten. Matrix products
stay torch's. Files are named as in ``reference``, which says what each op means.
"""

from __future__ import annotations

from leadline.kernels.cpu import (
    attention,
    compressor,
    engram,
    experts,
    indexer,
    kv_store,
    linear,
    mhc,
    norm,
    rope,
    router,
    sampling,
    window,
)

IMPLEMENTATIONS = {
    op.__name__: op
    for op in (
        norm.rms_norm,
        rope.rotate,
        linear.linear,
        mhc.mhc_coefficients,
        mhc.mhc_collapse,
        mhc.mhc_enter,
        mhc.mhc_expand,
        kv_store.pack_rows,
        kv_store.unpack_rows,
        kv_store.store_rows,
        kv_store.quantize_index_query,
        compressor.store_entries,
        compressor.store_index_keys,
        indexer.prepare_index_query,
        indexer.index_logits,
        indexer.candidate_logits,
        indexer.select_top_k,
        indexer.select_candidate_blocks,
        indexer.select_from_candidates,
        attention.sparse_attention,
        router.route,
        router.hash_route,
        experts.routed_experts,
        experts.shared_expert,
        engram.engram_inject,
        sampling.logprobs,
        window.plan_window,
        window.norm_rotate_store,
        window.norm_query_store_window,
    )
}
