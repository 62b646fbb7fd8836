"""The official tensors of a checkpoint, as one table: V4.1's here (v41-model 7.4).

``model_weights`` lists weights with their mathematical shapes; ``expected_tensors`` lists the
tensors that an official file holds for them. The writer of random checkpoints, strict loading and
``inspect`` all read these two.
"""

from __future__ import annotations

from leadline.config.families import AnyConfig
from leadline.config.model import ModelConfig
from leadline.config.v4 import V4Config
from leadline.kernels.packed import WeightFormat
from leadline.weights.names_v4 import v4_weights
from leadline.weights.table import (
    Part,
    Role,
    Table,
    TensorSpec,
    WeightSpec,
    add_attention,
    add_experts,
    stored_tensors,
)

# Tensors of a file that this version does not use, by the start of their name.
SKIPPED_PREFIXES: dict[str, str] = {
    "mtp.": "draft",
    "vision.": "vision",
    "aligner.": "vision",
    "image_": "vision",
}


def expected_tensors(config: AnyConfig) -> dict[str, TensorSpec]:
    """Every backbone and draft tensor of an official checkpoint, scales beside their codes.

    93,418 and 2,401 for V4.1-Flash; the 266 tensors of its vision tower are not listed. 67,612 and
    4,705 for V4-Flash-0731.
    """
    tensors: dict[str, TensorSpec] = {}
    for weight in model_weights(config).values():
        tensors |= stored_tensors(weight)
    return tensors


def model_weights(config: AnyConfig) -> dict[str, WeightSpec]:
    """Every backbone and draft weight by tensor name, in the order of the forward pass."""
    return v4_weights(config) if isinstance(config, V4Config) else _v41_weights(config)


def _v41_weights(c: ModelConfig) -> dict[str, WeightSpec]:
    backbone = Table(Part.BACKBONE, WeightFormat.FP8_BLOCK32)
    backbone.bf16("embed.weight", (c.vocab_size, c.hidden_size), Role.EMBEDDING)
    for layer in range(c.num_hidden_layers):
        backbone.enter(f"layers.{layer}.", layer)
        if layer in c.engram_layer_ids:
            _engram(backbone, c, c.engram_num_embeddings[c.engram_layer_ids.index(layer)])
        _block(backbone, c, c.n_routed_experts)
        if layer in c.kv_source_layer_ids:
            _compressed_kv(backbone, c, c.compress_ratios[layer])
        if layer in c.index_source_layer_ids:
            _indexer(backbone, c)
    backbone.enter("", None)
    backbone.bf16("norm.weight", (c.hidden_size,), Role.NORM)
    backbone.bf16("head.weight", (c.vocab_size, c.hidden_size), Role.HEAD)

    draft = Table(Part.DRAFT, WeightFormat.FP8_BLOCK32)
    for stage in range(c.num_nextn_predict_layers):
        draft.enter(f"mtp.{stage}.", None)
        _block(draft, c, c.dspark_n_routed_experts)
        _draft_extras(draft, c, stage)
    return backbone.weights | draft.weights


def vision_totals(config: AnyConfig) -> tuple[int, int]:
    """(tensors, bytes) of the vision tower, aligner and image delimiters; all bf16, V4.1 only.

    The names are not used yet. The shapes are those that add up to the official file's size: a
    block has two norms, a fused q/k/v and an output projection (both with bias), a fused gate and
    up matrix and a down matrix.
    """
    v = config.vision_config if isinstance(config, ModelConfig) else None
    text_width = config.hidden_size
    if v is None or v.num_hidden_layers == 0:
        return 0, 0
    width, inner = v.hidden_size, v.intermediate_size
    block = 2 * width + 4 * width * (width + 1) + 3 * width * inner
    patch_embedding = (3 * v.patch_size**2 + 1) * width
    aligner = (v.downsample_ratio**2 * width + 1) * text_width + (text_width + 1) * text_width
    values = v.num_hidden_layers * block + patch_embedding + width + aligner + 3 * text_width
    return 8 * v.num_hidden_layers + 3 + 4 + 3, 2 * values


def _block(t: Table, c: ModelConfig, num_experts: int) -> None:
    """What every backbone layer and every draft stage has."""
    add_attention(t, c)
    t.bf16("ffn.gate.weight", (num_experts, c.hidden_size), Role.ROUTER)
    t.fp32("ffn.gate.bias", (num_experts,), Role.ROUTER)
    t.fp32("ffn.gate.bias_vl", (num_experts,), Role.IMAGE_ROUTER)
    add_experts(t, c, num_experts)


def _compressed_kv(t: Table, c: ModelConfig, ratio: int) -> None:
    role = Role.COMPRESSED_KV
    t.bf16("attn.compressor.wkv.weight", (c.head_dim, c.hidden_size), role)
    if ratio > 1:  # a group of one needs no gate
        t.bf16("attn.compressor.wgate.weight", (c.head_dim, c.hidden_size), role)
    t.bf16("attn.compressor.norm.weight", (c.head_dim,), role)
    t.bf16("attn.indexer.wk.weight", (c.index_head_dim, c.head_dim), role)
    t.bf16("attn.indexer.k_norm.weight", (c.index_head_dim,), role)


def _indexer(t: Table, c: ModelConfig) -> None:
    shape = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    t.packed("attn.indexer.wq_b.weight", shape, Role.INDEXER)
    weights_shape = (c.index_n_heads, c.hidden_size)
    t.bf16("attn.indexer.weights_proj.weight", weights_shape, Role.INDEXER)


def _engram(t: Table, c: ModelConfig, rows: int) -> None:
    table_shape = (rows, c.engram_head_dim)
    t.packed("engram.embed.weight", table_shape, Role.ENGRAM_TABLE, WeightFormat.FP8_ROW32)
    kv_shape = ((c.hc_mult + 1) * c.hidden_size, c.engram_columns * c.engram_head_dim)
    t.packed("engram.wkv.weight", kv_shape, Role.ENGRAM)
    t.bf16("engram.q_weight", (c.hc_mult, c.hidden_size), Role.ENGRAM)
    t.bf16("engram.k_weight", (c.hc_mult, c.hidden_size), Role.ENGRAM)


def _draft_extras(t: Table, c: ModelConfig, stage: int) -> None:
    width, rank, role = c.hidden_size, c.dspark_markov_rank, Role.DRAFT_HEAD
    if stage == 0:
        t.packed("main_proj.weight", (width, len(c.dspark_target_layer_ids) * width), role)
        t.bf16("main_norm.weight", (width,), Role.NORM)
    if stage == c.num_nextn_predict_layers - 1:
        t.bf16("norm.weight", (width,), Role.NORM)
        t.bf16("markov_head.embed.weight", (c.vocab_size, rank), role)
        t.bf16("markov_head.head.weight", (c.vocab_size, rank), role)
        t.bf16("confidence_head.proj.weight", (1, width + rank), role)
