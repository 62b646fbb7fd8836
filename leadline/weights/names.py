"""The official tensors of a DeepSeek-V4.1 checkpoint, as one table (v41-model 7.4).

``model_weights`` lists weights with their mathematical shapes; ``expected_tensors`` lists the
tensors that an official file holds for them. The writer of random checkpoints, strict loading and
``inspect`` all read these two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from leadline.config.model import ModelConfig
from leadline.kernels.packed import WeightFormat
from leadline.weights.formats import PACKINGS, SCALE_DTYPE, scale_name


class Part(StrEnum):
    """The program that a weight belongs to."""

    BACKBONE = "backbone"
    DRAFT = "draft"


class Role(StrEnum):
    """What a weight does; parameters and bytes are summed by it."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norms"
    MHC = "hyper-connections"
    ATTENTION = "attention"
    COMPRESSED_KV = "compressed KV"
    INDEXER = "indexer"
    ROUTER = "router"
    IMAGE_ROUTER = "image router bias"  # not needed before there is a vision tower
    ROUTED_EXPERT = "routed experts"
    SHARED_EXPERT = "shared experts"
    ENGRAM = "engram projections"
    ENGRAM_TABLE = "engram tables"
    DRAFT_HEAD = "draft head"


# Tensors of a file that this version does not use, by the start of their name.
SKIPPED_PREFIXES: dict[str, str] = {
    "mtp.": "draft",
    "vision.": "vision",
    "aligner.": "vision",
    "image_": "vision",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """One weight.

    Attributes:
        name: tensor name of its values or codes; scales are ``formats.scale_name(name)``.
        shape: of the values, ``[out, in]`` for a matrix.
        format: how the official checkpoint packs it.
        dtype: safetensors type where ``format`` is plain.
        layer: backbone layer, None for global and draft weights.
    """

    name: str
    shape: tuple[int, ...]
    format: WeightFormat
    dtype: str
    part: Part
    role: Role
    layer: int | None = None

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an official file: what it must look like, and the weight it belongs to."""

    shape: tuple[int, ...]
    dtype: str
    part: Part
    role: Role
    format: WeightFormat

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


_ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every backbone and draft tensor of an official checkpoint, scales beside their codes.

    93,418 and 2,401 for V4.1-Flash; the 266 tensors of its vision tower are not listed.
    """
    tensors: dict[str, TensorSpec] = {}
    for weight in model_weights(config).values():
        tensors |= stored_tensors(weight)
    return tensors


def stored_tensors(weight: WeightSpec) -> dict[str, TensorSpec]:
    """The tensors that hold one weight in its official format: the weight, and maybe a scale."""
    tail = (weight.part, weight.role, weight.format)
    if weight.format is WeightFormat.PLAIN:
        return {weight.name: TensorSpec(weight.shape, weight.dtype, *tail)}
    packing = PACKINGS[weight.format]
    return {
        weight.name: TensorSpec(packing.code_shape(weight.shape), packing.code_dtype, *tail),
        scale_name(weight.name): TensorSpec(packing.scale_shape(weight.shape), SCALE_DTYPE, *tail),
    }


def model_weights(config: ModelConfig) -> dict[str, WeightSpec]:
    """Every backbone and draft weight by tensor name, in the order of the forward pass."""
    c = config
    backbone = _Table(Part.BACKBONE)
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

    draft = _Table(Part.DRAFT)
    for stage in range(c.num_nextn_predict_layers):
        draft.enter(f"mtp.{stage}.", None)
        _block(draft, c, c.dspark_n_routed_experts)
        _draft_extras(draft, c, stage)
    return backbone.weights | draft.weights


def vision_totals(config: ModelConfig) -> tuple[int, int]:
    """(tensors, bytes) of the vision tower, aligner and image delimiters; all bf16.

    The names are not used yet. The shapes are those that add up to the official file's size: a
    block has two norms, a fused q/k/v and an output projection (both with bias), a fused gate and
    up matrix and a down matrix.
    """
    v, text_width = config.vision_config, config.hidden_size
    if v is None or v.num_hidden_layers == 0:
        return 0, 0
    width, inner = v.hidden_size, v.intermediate_size
    block = 2 * width + 4 * width * (width + 1) + 3 * width * inner
    patch_embedding = (3 * v.patch_size**2 + 1) * width
    aligner = (v.downsample_ratio**2 * width + 1) * text_width + (text_width + 1) * text_width
    values = v.num_hidden_layers * block + patch_embedding + width + aligner + 3 * text_width
    return 8 * v.num_hidden_layers + 3 + 4 + 3, 2 * values


class _Table:
    """Collects weights under a name prefix."""

    def __init__(self, part: Part) -> None:
        self.weights: dict[str, WeightSpec] = {}
        self._part = part
        self.enter("", None)

    def enter(self, prefix: str, layer: int | None) -> None:
        self._prefix, self._layer = prefix, layer

    def bf16(self, name: str, shape: tuple[int, ...], role: Role) -> None:
        self._add(name, shape, role, WeightFormat.PLAIN, "BF16")

    def fp32(self, name: str, shape: tuple[int, ...], role: Role) -> None:
        self._add(name, shape, role, WeightFormat.PLAIN, "F32")

    def packed(
        self,
        name: str,
        shape: tuple[int, int],
        role: Role,
        format: WeightFormat = WeightFormat.FP8_BLOCK32,
    ) -> None:
        self._add(name, shape, role, format, PACKINGS[format].code_dtype)

    def _add(
        self, name: str, shape: tuple[int, ...], role: Role, format: WeightFormat, dtype: str
    ) -> None:
        full = self._prefix + name
        self.weights[full] = WeightSpec(
            name=full,
            shape=shape,
            format=format,
            dtype=dtype,
            part=self._part,
            role=role,
            layer=self._layer,
        )


def _block(t: _Table, c: ModelConfig, num_experts: int) -> None:
    """What every backbone layer and every draft stage has."""
    width, heads, d, inner = (
        c.hidden_size,
        c.num_attention_heads,
        c.head_dim,
        c.moe_intermediate_size,
    )
    mixes = c.hc_mult * (c.hc_mult + 2)
    for site in ("attn", "ffn"):
        t.fp32(f"hc_{site}_fn", (mixes, c.hc_mult * width), Role.MHC)
        t.fp32(f"hc_{site}_base", (mixes,), Role.MHC)
        t.fp32(f"hc_{site}_scale", (3,), Role.MHC)
    t.bf16("attn_norm.weight", (width,), Role.NORM)
    t.fp32("attn.attn_sink", (heads,), Role.ATTENTION)
    t.packed("attn.wq_a.weight", (c.q_lora_rank, width), Role.ATTENTION)
    t.bf16("attn.q_norm.weight", (c.q_lora_rank,), Role.NORM)
    t.packed("attn.wq_b.weight", (heads * d, c.q_lora_rank), Role.ATTENTION)
    t.packed("attn.wkv.weight", (d, width), Role.ATTENTION)
    t.bf16("attn.kv_norm.weight", (d,), Role.NORM)
    o_rank = c.o_groups * c.o_lora_rank
    t.packed("attn.wo_a.weight", (o_rank, heads // c.o_groups * d), Role.ATTENTION)
    t.packed("attn.wo_b.weight", (width, o_rank), Role.ATTENTION)
    t.bf16("ffn_norm.weight", (width,), Role.NORM)
    t.bf16("ffn.gate.weight", (num_experts, width), Role.ROUTER)
    t.fp32("ffn.gate.bias", (num_experts,), Role.ROUTER)
    t.fp32("ffn.gate.bias_vl", (num_experts,), Role.IMAGE_ROUTER)
    for which, shape in _expert_matrices(width, inner):
        t.packed(f"ffn.shared_experts.{which}.weight", shape, Role.SHARED_EXPERT)
    for expert in range(num_experts):
        for which, shape in _expert_matrices(width, inner):
            name = f"ffn.experts.{expert}.{which}.weight"
            t.packed(name, shape, Role.ROUTED_EXPERT, WeightFormat.MXFP4)


def _expert_matrices(width: int, inner: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield "w1", (inner, width)
    yield "w2", (width, inner)
    yield "w3", (inner, width)


def _compressed_kv(t: _Table, c: ModelConfig, ratio: int) -> None:
    role = Role.COMPRESSED_KV
    t.bf16("attn.compressor.wkv.weight", (c.head_dim, c.hidden_size), role)
    if ratio > 1:  # a group of one needs no gate
        t.bf16("attn.compressor.wgate.weight", (c.head_dim, c.hidden_size), role)
    t.bf16("attn.compressor.norm.weight", (c.head_dim,), role)
    t.bf16("attn.indexer.wk.weight", (c.index_head_dim, c.head_dim), role)
    t.bf16("attn.indexer.k_norm.weight", (c.index_head_dim,), role)


def _indexer(t: _Table, c: ModelConfig) -> None:
    shape = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    t.packed("attn.indexer.wq_b.weight", shape, Role.INDEXER)
    weights_shape = (c.index_n_heads, c.hidden_size)
    t.bf16("attn.indexer.weights_proj.weight", weights_shape, Role.INDEXER)


def _engram(t: _Table, c: ModelConfig, rows: int) -> None:
    table_shape = (rows, c.engram_head_dim)
    t.packed("engram.embed.weight", table_shape, Role.ENGRAM_TABLE, WeightFormat.FP8_ROW32)
    kv_shape = ((c.hc_mult + 1) * c.hidden_size, c.engram_columns * c.engram_head_dim)
    t.packed("engram.wkv.weight", kv_shape, Role.ENGRAM)
    t.bf16("engram.q_weight", (c.hc_mult, c.hidden_size), Role.ENGRAM)
    t.bf16("engram.k_weight", (c.hc_mult, c.hidden_size), Role.ENGRAM)


def _draft_extras(t: _Table, c: ModelConfig, stage: int) -> None:
    width, rank, role = c.hidden_size, c.dspark_markov_rank, Role.DRAFT_HEAD
    if stage == 0:
        t.packed("main_proj.weight", (width, len(c.dspark_target_layer_ids) * width), role)
        t.bf16("main_norm.weight", (width,), Role.NORM)
    if stage == c.num_nextn_predict_layers - 1:
        t.bf16("norm.weight", (width,), Role.NORM)
        t.bf16("markov_head.embed.weight", (c.vocab_size, rank), role)
        t.bf16("markov_head.head.weight", (c.vocab_size, rank), role)
        t.bf16("confidence_head.proj.weight", (1, width + rank), role)
