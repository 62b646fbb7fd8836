"""Model shapes with a name, for use without any file. V4's are in ``v4_presets``."""

from __future__ import annotations

import dataclasses

from leadline.config.families import AnyConfig
from leadline.config.model import ModelConfig, QuantizationConfig, VisionConfig
from leadline.config.rules import RopeScaling
from leadline.config.v4_presets import V4_PRESETS
from leadline.core.errors import ConfigError

# The official model: v41-model 1.1 and 1.2.
V41_FLASH = ModelConfig(
    image_token_id=129264,
    vision_config=VisionConfig(num_hidden_layers=32),
    quantization_config=QuantizationConfig(),
    vocab_size=129280,
    hidden_size=5120,
    num_hidden_layers=40,
    moe_intermediate_size=2304,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1280,
    o_lora_rank=1024,
    o_groups=8,
    swiglu_limit=10.0,
    rms_norm_eps=1e-20,
    max_position_embeddings=1048576,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=RopeScaling("yarn", 16.0, 32.0, 1.0, 65536),
    n_routed_experts=384,
    num_experts_per_tok=6,
    routed_scaling_factor=1.5,
    sliding_window=128,
    compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
    kv_source_layer_ids=(2, 8, 14, 20),
    index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
    index_n_heads=32,
    index_head_dim=128,
    index_topk=512,
    candidate_source_layer_id=20,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    engram_layer_ids=(1, 14),
    engram_num_embeddings=(384006168, 384016682),
    engram_max_ngram_size=4,
    engram_vocab_size=16000000,
    engram_n_heads=8,
    engram_head_dim=256,
    engram_compressed_vocab_size=99092,
    num_nextn_predict_layers=3,
    dspark_block_size=5,
    dspark_noise_token_id=128799,
    dspark_target_layer_ids=(37, 38, 39),
    dspark_markov_rank=256,
    dspark_n_routed_experts=128,
    dspark_num_experts_per_tok=3,
)

# What one GPU of four holds: every layer at official widths with a quarter of the experts. The
# Engram tables (12.7 GB together) fit in host memory; their rows follow from the primes above
# engram_vocab_size (v41-model 6.2). As many token classes as tokens: the token map is the identity.
SLICE_96 = dataclasses.replace(
    V41_FLASH,
    n_routed_experts=96,
    engram_vocab_size=1000000,
    engram_num_embeddings=(24003916, 24010950),
    engram_compressed_vocab_size=V41_FLASH.vocab_size,
)

# For tests: every kind of layer in 8 layers, the official window, formats of the official
# checkpoint, and enough positions for long prompts. The token map is the identity.
TINY_WINDOW128 = ModelConfig(
    image_token_id=511,
    quantization_config=QuantizationConfig(),
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=8,
    moe_intermediate_size=64,
    num_attention_heads=8,
    head_dim=64,
    qk_rope_head_dim=16,
    q_lora_rank=64,
    o_lora_rank=32,
    o_groups=4,
    swiglu_limit=2.0,
    rms_norm_eps=1e-20,
    max_position_embeddings=32768,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=RopeScaling("yarn", 16.0, 32.0, 1.0, 2048),
    n_routed_experts=8,
    num_experts_per_tok=3,
    routed_scaling_factor=1.5,
    sliding_window=128,
    compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0),
    kv_source_layer_ids=(2, 4),
    index_source_layer_ids=(2, 4, 6),
    index_n_heads=16,
    index_head_dim=32,
    index_topk=16,
    candidate_source_layer_id=4,
    candidate_topk_blocks=8,
    candidate_block_size=8,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    engram_layer_ids=(1, 3),
    engram_num_embeddings=(630, 834),
    engram_max_ngram_size=4,
    engram_vocab_size=97,
    engram_n_heads=2,
    engram_head_dim=32,
    engram_compressed_vocab_size=512,
    num_nextn_predict_layers=3,
    dspark_block_size=5,
    dspark_noise_token_id=509,
    dspark_target_layer_ids=(5, 6, 7),
    dspark_markov_rank=32,
    dspark_n_routed_experts=4,
    dspark_num_experts_per_tok=2,
)

# The shape of the trained model of tiny-model.md section 3: 21.7 M parameters with its draft.
TINY_22M = ModelConfig(
    image_token_id=60,
    vision_config=VisionConfig(num_hidden_layers=0),
    quantization_config=QuantizationConfig(),
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=12,
    moe_intermediate_size=64,
    num_attention_heads=8,
    head_dim=64,
    qk_rope_head_dim=16,
    q_lora_rank=128,
    o_lora_rank=64,
    o_groups=2,
    swiglu_limit=10.0,
    rms_norm_eps=1e-20,
    max_position_embeddings=16384,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=RopeScaling("yarn", 4.0, 32.0, 1.0, 4096),
    n_routed_experts=16,
    num_experts_per_tok=2,
    routed_scaling_factor=1.5,
    sliding_window=32,
    compress_ratios=(0,) * 2 + (2,) * 4 + (1,) * 6 + (0,) * 3,
    kv_source_layer_ids=(2, 4, 6),
    index_source_layer_ids=(2, 4, 6, 8, 10),
    index_n_heads=4,
    index_head_dim=32,
    index_topk=64,
    candidate_source_layer_id=6,
    candidate_topk_blocks=32,
    candidate_block_size=8,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    engram_layer_ids=(1, 4),
    engram_num_embeddings=(49796, 50980),
    engram_max_ngram_size=4,
    engram_vocab_size=4096,
    engram_n_heads=4,
    engram_head_dim=32,
    engram_compressed_vocab_size=3181,
    num_nextn_predict_layers=3,
    dspark_block_size=5,
    dspark_noise_token_id=62,
    dspark_target_layer_ids=(9, 10, 11),
    dspark_markov_rank=32,
    dspark_n_routed_experts=8,
    dspark_num_experts_per_tok=1,
)

V41_PRESETS: dict[str, ModelConfig] = {
    "v4.1-flash": V41_FLASH,
    "slice-96": SLICE_96,
    "tiny-window128": TINY_WINDOW128,
    "tiny-22m": TINY_22M,
}
PRESETS: dict[str, AnyConfig] = {**V41_PRESETS, **V4_PRESETS}


def any_preset(name: str) -> AnyConfig:
    """The configuration called ``name``, of any known model.

    Raises:
        ConfigError: there is none of that name; the message lists those there are.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset is {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def preset(name: str) -> ModelConfig:
    """The configuration called ``name``, of V4.1.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in V41_PRESETS:
        raise ConfigError(f"preset is {name!r}; choose one of {', '.join(V41_PRESETS)}")
    return V41_PRESETS[name]
