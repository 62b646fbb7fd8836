"""Shapes of DeepSeek-V4 with a name (v4-model 1.1 and 1.2)."""

from __future__ import annotations

import dataclasses

from leadline.config.rules import RopeScaling
from leadline.config.v4 import V4Config, V4QuantizationConfig

# The checkpoints of April, whose draft is one MTP layer.
V4_FLASH = V4Config(
    quantization_config=V4QuantizationConfig(),
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    moe_intermediate_size=2048,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_lora_rank=1024,
    o_groups=8,
    swiglu_limit=10.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=1048576,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=RopeScaling("yarn", 16.0, 32.0, 1.0, 65536),
    n_routed_experts=256,
    num_experts_per_tok=6,
    routed_scaling_factor=1.5,
    num_hash_layers=3,
    sliding_window=128,
    compress_ratios=(0, 0) + (4, 128) * 20 + (4,) + (0,),
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    num_nextn_predict_layers=1,
)
V4_PRO = dataclasses.replace(
    V4_FLASH,
    hidden_size=7168,
    num_hidden_layers=61,
    moe_intermediate_size=3072,
    num_attention_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    n_routed_experts=384,
    routed_scaling_factor=2.5,
    compress_ratios=(128, 128) + (4, 128) * 29 + (4,) + (0,),
    index_topk=1024,
)

# Later ones have the same backbone and DSpark's three stages.
V4_FLASH_0731 = dataclasses.replace(
    V4_FLASH,
    compress_ratios=(*V4_FLASH.compress_ratios, 0, 0),
    dspark_block_size=5,
    dspark_noise_token_id=128799,
    dspark_target_layer_ids=(40, 41, 42),
    dspark_markov_rank=256,
)
V4_PRO_0813 = dataclasses.replace(
    V4_PRO,
    compress_ratios=(*V4_PRO.compress_ratios, 0, 0),
    dspark_block_size=5,
    dspark_noise_token_id=128799,
    dspark_target_layer_ids=(58, 59, 60),
    dspark_markov_rank=512,
)

# What one GPU holds beside long contexts: every layer at official widths with a quarter of the
# experts. There is no draft.
V4_FLASH_SLICE = dataclasses.replace(
    V4_FLASH,
    n_routed_experts=64,
    num_nextn_predict_layers=0,
    compress_ratios=V4_FLASH.compress_ratios[: V4_FLASH.num_hidden_layers],
)

# For tests: every kind of layer, partial blocks in FP8 weights, the official window and draft, and
# widths that the packed records fit (v4-model 11).
TINY_V4 = dataclasses.replace(
    V4_FLASH,
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=6,
    moe_intermediate_size=128,
    num_attention_heads=4,
    head_dim=80,
    qk_rope_head_dim=16,
    q_lora_rank=128,
    o_lora_rank=64,
    o_groups=2,
    swiglu_limit=0.5,
    max_position_embeddings=32768,
    compress_rope_theta=40000.0,
    rope_scaling=RopeScaling("yarn", 16.0, 32.0, 1.0, 2048),
    n_routed_experts=8,
    num_experts_per_tok=2,
    num_hash_layers=2,
    compress_ratios=(0, 4, 128, 4, 128, 4, 0, 0, 0),
    index_n_heads=16,
    index_head_dim=32,
    index_topk=16,
    dspark_block_size=3,
    dspark_noise_token_id=7,
    dspark_target_layer_ids=(3, 4, 5),
    dspark_markov_rank=32,
)

V4_PRESETS = {
    "v4-flash": V4_FLASH,
    "v4-flash-0731": V4_FLASH_0731,
    "v4-flash-slice": V4_FLASH_SLICE,
    "v4-pro": V4_PRO,
    "v4-pro-0813": V4_PRO_0813,
    "tiny-v4": TINY_V4,
}
