"""The operations of the forward: one contract each, and the only kernels that models call.

Shapes: m rows of a step (all groups, packed), g groups, D hidden_size, S hc_mult, H query heads,
d head_dim, r qk_rope_head_dim, Hi index heads, di index_head_dim, E experts, F expert width,
W window, K selected entries, N visible entries, n longest n-gram.

Activations are bf16, float32 or float64; "wide" means float32, or float64 for float64 activations.
Where activations are bf16, each op rounds where v41-model 4.5 says and nowhere else. Section
numbers refer to ``v41-model`` unless another specification is named.

Files are named as in ``reference``. An op whose reference says it all is declared there by name
only, and has its contract at home.
"""

from __future__ import annotations

from leadline.kernels.ops.attention import sparse_attention
from leadline.kernels.ops.compressor import store_entries, store_index_keys
from leadline.kernels.ops.engram import engram_hash, engram_history, engram_inject, gather_rows
from leadline.kernels.ops.experts import routed_experts, shared_expert
from leadline.kernels.ops.indexer import (
    candidate_logits,
    index_logits,
    prepare_index_query,
    quantize_index_query,
    select_candidate_blocks,
    select_from_candidates,
    select_top_k,
)
from leadline.kernels.ops.kv_store import pack_rows, store_rows, unpack_rows

# From here on ``ops.linear`` is the op, and not its file.
from leadline.kernels.ops.linear import grouped_linear, linear, output_projection, wide_linear
from leadline.kernels.ops.mhc import (
    mhc_coefficients,
    mhc_collapse,
    mhc_enter,
    mhc_expand,
    mhc_head,
    mhc_seam,
)
from leadline.kernels.ops.norm import rms_norm
from leadline.kernels.ops.rope import rope_angles, rotate
from leadline.kernels.ops.router import hash_route, route
from leadline.kernels.ops.sampling import (
    apply_bitmask,
    apply_penalties,
    counter_uniform,
    greedy,
    logprobs,
    sample,
)
from leadline.kernels.ops.window import (
    commit_window,
    norm_query_store_window,
    norm_rotate_store,
    plan_window,
)

__all__ = [
    "apply_bitmask",
    "apply_penalties",
    "candidate_logits",
    "commit_window",
    "counter_uniform",
    "engram_hash",
    "engram_history",
    "engram_inject",
    "gather_rows",
    "greedy",
    "grouped_linear",
    "hash_route",
    "index_logits",
    "linear",
    "logprobs",
    "mhc_coefficients",
    "mhc_collapse",
    "mhc_enter",
    "mhc_expand",
    "mhc_head",
    "mhc_seam",
    "norm_query_store_window",
    "norm_rotate_store",
    "output_projection",
    "pack_rows",
    "plan_window",
    "prepare_index_query",
    "quantize_index_query",
    "rms_norm",
    "rope_angles",
    "rotate",
    "route",
    "routed_experts",
    "sample",
    "select_candidate_blocks",
    "select_from_candidates",
    "select_top_k",
    "shared_expert",
    "sparse_attention",
    "store_entries",
    "store_index_keys",
    "store_rows",
    "unpack_rows",
    "wide_linear",
]
