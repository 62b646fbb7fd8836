"""Weights and tensors of a checkpoint as rows of a table, and those of every layer of any model.

A weight has its mathematical shape; the tensors that hold it in an official file have theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from leadline.config.families import AnyConfig
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """One weight.

    Attributes:
        name: tensor name of its values or codes; scales are ``formats.scale_name(name)``.
        shape: of the values, ``[out, in]`` for a matrix.
        format: how the official checkpoint packs it.
        dtype: safetensors type where ``format`` is plain.
        input_block: channels of a product's input that share a scale, if it is quantised.
        layer: backbone layer, None for global and draft weights.
        below: what whole numbers (``I64``) lie below.
    """

    name: str
    shape: tuple[int, ...]
    format: WeightFormat
    dtype: str
    part: Part
    role: Role
    input_block: int
    layer: int | None = None
    below: int = 0

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


_ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}


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


class Table:
    """Collects weights under a name prefix.

    Args:
        part: of all of them.
        matrices: how the model's checkpoints pack every matrix but those of routed experts.
    """

    def __init__(self, part: Part, matrices: WeightFormat) -> None:
        self.weights: dict[str, WeightSpec] = {}
        self._part, self._matrices = part, matrices
        self.enter("", None)

    def enter(self, prefix: str, layer: int | None) -> None:
        """Names that follow begin with ``prefix``; ``layer`` is that of the backbone."""
        self._prefix, self._layer = prefix, layer

    def bf16(self, name: str, shape: tuple[int, ...], role: Role) -> None:
        """A plain weight."""
        self._add(name, shape, role, WeightFormat.PLAIN, "BF16")

    def fp32(self, name: str, shape: tuple[int, ...], role: Role) -> None:
        """A plain weight that bf16 does not suffice for."""
        self._add(name, shape, role, WeightFormat.PLAIN, "F32")

    def ids(self, name: str, shape: tuple[int, int], role: Role, *, below: int) -> None:
        """Rows of different whole numbers from 0 up to below ``below``."""
        self._add(name, shape, role, WeightFormat.PLAIN, "I64", below)

    def packed(
        self, name: str, shape: tuple[int, int], role: Role, format: WeightFormat | None = None
    ) -> None:
        """A matrix with scales, packed as most of the model's are or in a format of its own."""
        format = format or self._matrices
        self._add(name, shape, role, format, PACKINGS[format].code_dtype)

    def _add(
        self,
        name: str,
        shape: tuple[int, ...],
        role: Role,
        format: WeightFormat,
        dtype: str,
        below: int = 0,
    ) -> None:
        full = self._prefix + name
        self.weights[full] = WeightSpec(
            name=full,
            shape=shape,
            format=format,
            dtype=dtype,
            part=self._part,
            role=role,
            # Tiles are as wide as the blocks of activations, and experts take these like the rest.
            input_block=PACKINGS[self._matrices].block[1],
            layer=self._layer,
            below=below,
        )


def add_attention(t: Table, c: AnyConfig) -> None:
    """Mixes, norms and attention, which every layer and every draft stage has."""
    width, heads, d = c.hidden_size, c.num_attention_heads, c.head_dim
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


def add_experts(t: Table, c: AnyConfig, num_experts: int) -> None:
    """The shared expert, and so many routed ones."""
    width, inner = c.hidden_size, c.moe_intermediate_size
    matrices = {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}
    for which, shape in matrices.items():
        t.packed(f"ffn.shared_experts.{which}.weight", shape, Role.SHARED_EXPERT)
    for expert in range(num_experts):
        for which, shape in matrices.items():
            name = f"ffn.experts.{expert}.{which}.weight"
            t.packed(name, shape, Role.ROUTED_EXPERT, WeightFormat.MXFP4)
