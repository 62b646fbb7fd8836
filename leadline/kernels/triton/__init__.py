"""bf16 ops as Triton kernels: what runs on a GPU. Files are named as in ``reference``.

Kernels use nothing that only Hopper has unless their file says so. Under Triton's interpreter
(``TRITON_INTERPRET=1``) all of them run on a CPU, slowly: that is how CI checks them.

Every shape of a model that loads runs. What a kernel does not serve, as weights that are not packed
or caches with plain index keys, the implementation itself hands to the reference.
"""

from __future__ import annotations

from leadline.kernels.triton import (
    attention,
    compressor,
    engram,
    experts,
    grouped_linear,
    indexer,
    linear,
    logprobs,
    mhc,
    mhc_head,
    norm,
    rope,
    router,
    sampling,
    selection,
    shared_expert,
    window,
)
from leadline.kernels.triton.ahead import compile_ahead

__all__ = ["IMPLEMENTATIONS", "compile_ahead"]

IMPLEMENTATIONS = {
    op.__name__: op
    for op in (
        norm.rms_norm,
        rope.rope_angles,
        mhc.mhc_coefficients,
        mhc.mhc_enter,
        mhc.mhc_expand,
        mhc.mhc_seam,
        mhc_head.mhc_head,
        linear.linear,
        linear.wide_linear,
        grouped_linear.grouped_linear,
        grouped_linear.output_projection,
        window.norm_query_store_window,
        window.norm_rotate_store,
        window.plan_window,
        window.commit_window,
        compressor.store_entries,
        compressor.store_index_keys,
        indexer.prepare_index_query,
        indexer.quantize_index_query,
        indexer.index_logits,
        indexer.candidate_logits,
        selection.select_top_k,
        selection.select_candidate_blocks,
        selection.select_from_candidates,
        attention.sparse_attention,
        router.route,
        router.hash_route,
        experts.routed_experts,
        shared_expert.shared_expert,
        engram.engram_history,
        engram.engram_hash,
        engram.engram_inject,
        engram.gather_rows,
        sampling.apply_bitmask,
        sampling.apply_penalties,
        sampling.greedy,
        sampling.sample,
        logprobs.logprobs,
    )
}
