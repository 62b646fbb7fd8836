"""The official tensors of a DeepSeek-V4 checkpoint (v4-model 7.4)."""

from __future__ import annotations

from leadline.config.v4 import V4Config, V4LayerMode
from leadline.kernels.packed import WeightFormat
from leadline.weights.table import Part, Role, Table, WeightSpec, add_attention, add_experts


def v4_weights(c: V4Config) -> dict[str, WeightSpec]:
    """Every backbone and draft weight by tensor name, in the order of the forward pass."""
    backbone = Table(Part.BACKBONE, WeightFormat.FP8_BLOCK128)
    backbone.bf16("embed.weight", (c.vocab_size, c.hidden_size), Role.EMBEDDING)
    for layer in range(c.num_hidden_layers):
        backbone.enter(f"layers.{layer}.", layer)
        _block(backbone, c, hashed=layer < c.num_hash_layers)
        if c.mode(layer) is not V4LayerMode.WINDOW:
            _compressor(backbone, c, "attn.compressor.", c.head_dim, layer, Role.COMPRESSED_KV)
        if c.mode(layer) is V4LayerMode.SPARSE:
            _indexer(backbone, c, layer)
    backbone.enter("", None)
    _end(backbone, c)
    backbone.bf16("head.weight", (c.vocab_size, c.hidden_size), Role.HEAD)

    draft = Table(Part.DRAFT, WeightFormat.FP8_BLOCK128)
    for stage in range(c.num_draft_stages):
        draft.enter(f"mtp.{stage}.", None)
        _block(draft, c, hashed=False)
        if c.has_dspark:
            _dspark_extras(draft, c, stage)
        else:
            _mtp_extras(draft, c)
    return backbone.weights | draft.weights


def _block(t: Table, c: V4Config, *, hashed: bool) -> None:
    """What every backbone layer and every draft stage has."""
    add_attention(t, c)
    t.bf16("ffn.gate.weight", (c.n_routed_experts, c.hidden_size), Role.ROUTER)
    if hashed:
        experts_of_tokens = (c.vocab_size, c.num_experts_per_tok)
        t.ids("ffn.gate.tid2eid", experts_of_tokens, Role.ROUTER, below=c.n_routed_experts)
    else:
        t.fp32("ffn.gate.bias", (c.n_routed_experts,), Role.ROUTER)
    add_experts(t, c, c.n_routed_experts)


def _compressor(t: Table, c: V4Config, prefix: str, width: int, layer: int, role: Role) -> None:
    """Pools groups of tokens to ``width`` channels; those that overlap have two halves (3.3)."""
    ratio = c.compress_ratios[layer]
    halves = 2 if c.mode(layer) is V4LayerMode.SPARSE else 1
    t.bf16(f"{prefix}wkv.weight", (halves * width, c.hidden_size), role)
    t.bf16(f"{prefix}wgate.weight", (halves * width, c.hidden_size), role)
    t.fp32(f"{prefix}ape", (ratio, halves * width), role)
    t.bf16(f"{prefix}norm.weight", (width,), role)


def _indexer(t: Table, c: V4Config, layer: int) -> None:
    queries = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    t.packed("attn.indexer.wq_b.weight", queries, Role.INDEXER)
    t.bf16("attn.indexer.weights_proj.weight", (c.index_n_heads, c.hidden_size), Role.INDEXER)
    _compressor(t, c, "attn.indexer.compressor.", c.index_head_dim, layer, Role.INDEXER)


def _end(t: Table, c: V4Config) -> None:
    """What makes one row of the streams: the head's mix, and the norm (2.2)."""
    t.fp32("hc_head_fn", (c.hc_mult, c.hc_mult * c.hidden_size), Role.MHC)
    t.fp32("hc_head_base", (c.hc_mult,), Role.MHC)
    t.fp32("hc_head_scale", (1,), Role.MHC)
    t.bf16("norm.weight", (c.hidden_size,), Role.NORM)


def _mtp_extras(t: Table, c: V4Config) -> None:
    width = c.hidden_size
    for which in ("e", "h"):
        t.packed(f"{which}_proj.weight", (width, width), Role.DRAFT_HEAD)
        t.bf16(f"{which}norm.weight", (width,), Role.NORM)
    _end(t, c)


def _dspark_extras(t: Table, c: V4Config, stage: int) -> None:
    width, rank, role = c.hidden_size, c.dspark_markov_rank, Role.DRAFT_HEAD
    if stage == 0:
        t.packed("main_proj.weight", (width, c.num_draft_stages * width), role)
        t.bf16("main_norm.weight", (width,), Role.NORM)
    if stage == c.num_draft_stages - 1:
        _end(t, c)
        t.bf16("markov_head.markov_w1.weight", (c.vocab_size, rank), role)
        t.bf16("markov_head.markov_w2.weight", (c.vocab_size, rank), role)
        t.bf16("confidence_head.proj.weight", (1, width + rank), role)
