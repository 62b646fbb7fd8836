"""The official ``config.json`` of ``deepseek_v4`` as one frozen dataclass (v4-model 1).

The file is flat, and its keys are those of V4.1 but for what only one of the two models has. Files
that Transformers saved again spell schedule and rotation in another way, which is read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from leadline.config.keys import as_object, collect, keys_to_json, missing_keys
from leadline.config.rules import RopeScaling, check_common, check_targets
from leadline.core.errors import ConfigError, NotSupported

ARCHITECTURE = "DeepseekV4ForCausalLM"
MODEL_TYPE = "deepseek_v4"

# The ratio whose entries overlap and are selected by an indexer (v4-model 1.2).
SPARSE_RATIO = 4


class V4LayerMode(StrEnum):
    """What a layer attends to beside its window (v4-model 1.2)."""

    WINDOW = "window"
    SPARSE = "sparse"  # c4a: the best entries, by an indexer of its own
    DENSE = "dense"  # c128a: every entry


@dataclass(frozen=True, slots=True)
class V4QuantizationConfig:
    """How the checkpoint's weights are packed, but for routed experts (v4-model 7.2)."""

    quant_method: str = "fp8"
    activation_scheme: str = "dynamic"
    fmt: str = "e4m3"
    scale_fmt: str = "ue8m0"
    weight_block_size: tuple[int, ...] = (128, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Config:
    """DeepSeek-V4. The comments give the symbol of v4-model section 0."""

    architectures: tuple[str, ...] = (ARCHITECTURE,)
    dtype: str = "bfloat16"
    bos_token_id: int = 0
    eos_token_id: int = 1
    quantization_config: V4QuantizationConfig | None = None
    expert_dtype: str = "fp4"  # absent in the first upload

    vocab_size: int  # V
    hidden_size: int  # D
    num_hidden_layers: int  # L
    moe_intermediate_size: int  # F
    num_attention_heads: int  # H
    num_key_value_heads: int = 1
    head_dim: int  # d
    qk_rope_head_dim: int  # r
    q_lora_rank: int  # Rq
    o_lora_rank: int  # Ro
    o_groups: int  # G
    hidden_act: str = "silu"
    swiglu_limit: float
    rms_norm_eps: float
    attention_bias: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    n_routed_experts: int  # E
    n_shared_experts: int = 1
    num_experts_per_tok: int  # k_e
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float  # rho
    num_hash_layers: int  # K_h
    sliding_window: int  # W
    compress_ratios: tuple[int, ...]  # m_l; the draft stages' entries come last
    index_n_heads: int  # Hi
    index_head_dim: int  # di
    index_topk: int  # K
    hc_mult: int  # S
    hc_sinkhorn_iters: int  # T_s
    hc_eps: float
    num_nextn_predict_layers: int = 0  # MTP layers; says nothing of DSpark
    dspark_block_size: int = 0  # not in files with an MTP layer
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def has_dspark(self) -> bool:
        """Whether the draft is DSpark's; else it is one MTP layer, or there is none."""
        return self.dspark_block_size > 0

    @property
    def num_draft_stages(self) -> int:
        """Draft blocks of the checkpoint: one for each feature that DSpark taps, or the MTP's."""
        return (
            len(self.dspark_target_layer_ids) if self.has_dspark else self.num_nextn_predict_layers
        )

    @property
    def cut(self) -> int:
        """The first layer that a prompt's tokens need not run through: there is none."""
        return self.num_hidden_layers

    def kv_source(self, layer: int) -> int | None:
        """The layer itself, which shares its compressed cache with none; None without one."""
        return layer if self.compress_ratios[layer] else None

    def index_source(self, layer: int) -> int | None:
        """The layer itself, if it has an indexer."""
        return layer if self.mode(layer) is V4LayerMode.SPARSE else None

    def mode(self, layer: int) -> V4LayerMode:
        """What ``layer`` attends to; any ratio but 4 is as the official 128."""
        ratio = self.compress_ratios[layer]
        if not ratio:
            return V4LayerMode.WINDOW
        return V4LayerMode.SPARSE if ratio == SPARSE_RATIO else V4LayerMode.DENSE


def parse_v4_config(raw: Any, *, where: str = "config.json") -> V4Config:
    """Turn the official flat JSON, or that of Transformers, into a ``V4Config``.

    Args:
        raw: the parsed file.
        where: what error messages call the file.

    Raises:
        ConfigError: one message naming the key.
        NotSupported: another model.
    """
    top = as_object(raw, where=where)
    if top.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        raise NotSupported(f"{where}: model_type is {top['model_type']!r}, not {MODEL_TYPE!r}")
    found = collect(V4Config, [("", _official(top, where))], aliases=_ALIASES, where=where)
    if missing := missing_keys(V4Config, found):
        raise ConfigError(f"{where}: missing key(s) {', '.join(missing)}")
    try:
        return V4Config(**found)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def v4_config_to_json(config: V4Config) -> dict[str, Any]:
    """The inverse of ``parse_v4_config``: the official flat layout."""
    keys = keys_to_json(config)
    keys["torch_dtype"] = keys.pop("dtype")
    keys["rope_scaling"]["type"] = keys["rope_scaling"].pop("rope_type")
    if not config.has_dspark:
        keys = {key: value for key, value in keys.items() if not key.startswith("dspark_")}
    return {"model_type": MODEL_TYPE, **keys}


_ALIASES = {"torch_dtype": "dtype"}
_MOST_STAGES = 3  # of any draft
_RATIOS_OF_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": SPARSE_RATIO,
    "heavily_compressed_attention": 128,
}


def _official(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same keys as the official file spells them (v4-model 1.1)."""
    keys = dict(raw)
    packing = keys.get("quantization_config")
    if isinstance(packing, Mapping) and "expert_dtype" in packing:
        keys["quantization_config"] = {k: v for k, v in packing.items() if k != "expert_dtype"}
        keys.setdefault("expert_dtype", packing["expert_dtype"])
    if "layer_types" in keys:
        rates = {
            **_RATIOS_OF_TYPES,
            **_mapping(keys.pop("compress_rates", {}), "compress_rates", where),
        }
        types = keys.pop("layer_types")
        if not isinstance(types, list) or any(kind not in rates for kind in types):
            raise ConfigError(f"{where}: layer_types is {types!r}; its items must be {[*rates]}")
        keys.setdefault("compress_ratios", [rates[kind] for kind in types] + [0] * _MOST_STAGES)
    if "mlp_layer_types" in keys:
        types = keys.pop("mlp_layer_types")
        hashed = types.count("hash_moe") if isinstance(types, list) else None
        if hashed is None or types != ["hash_moe"] * hashed + ["moe"] * (len(types) - hashed):
            raise ConfigError(
                f"{where}: mlp_layer_types is {types!r}; 'hash_moe' first, then 'moe'"
            )
        keys.setdefault("num_hash_layers", hashed)
    if "rope_parameters" in keys:
        rope = _mapping(keys.pop("rope_parameters"), "rope_parameters", where)
        main, compress = (
            _mapping(rope.get(name), f"rope_parameters.{name}", where)
            for name in ("main", "compress")
        )
        keys.setdefault("rope_theta", main.get("rope_theta"))
        keys.setdefault("compress_rope_theta", compress.get("rope_theta"))
        wanted = RopeScaling.__dataclass_fields__
        keys.setdefault("rope_scaling", {k: v for k, v in compress.items() if k in wanted})
    scaling = keys.get("rope_scaling")
    if isinstance(scaling, Mapping) and "type" in scaling:
        renamed = {"rope_type": scaling["type"], **scaling}
        keys["rope_scaling"] = {k: v for k, v in renamed.items() if k != "type"}
    return keys


def _mapping(value: Any, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {name} is {value!r}; it must be an object")
    return value


def _check(c: V4Config) -> None:
    """The sanity rules of v4-model 1.2."""
    check_common(c, model="V4", architecture=ARCHITECTURE, quantization=V4QuantizationConfig())
    if c.expert_dtype != "fp4":
        raise ConfigError(
            f"expert_dtype is {c.expert_dtype!r}; only 'fp4' is known: the layout of -Base "
            "checkpoints is not"
        )
    layers, drafts = c.num_hidden_layers, c.num_draft_stages
    if len(c.compress_ratios) < layers + drafts:
        raise ConfigError(
            f"compress_ratios has {len(c.compress_ratios)} entries; num_hidden_layers ({layers}) "
            f"and {drafts} draft stages need {layers + drafts}"
        )
    if not 0 <= c.num_hash_layers <= layers:
        raise ConfigError(f"num_hash_layers is {c.num_hash_layers}; it must lie in 0..{layers}")
    if c.index_head_dim & (c.index_head_dim - 1):
        raise ConfigError(
            f"index_head_dim is {c.index_head_dim}; the Hadamard rotation needs a power of two"
        )
    if c.has_dspark:
        if c.dspark_markov_rank < 1 or not c.dspark_target_layer_ids:
            raise ConfigError(
                "dspark_block_size is given, so dspark_markov_rank must be positive and "
                "dspark_target_layer_ids name layers"
            )
        check_targets(c)
    elif c.dspark_target_layer_ids:
        raise ConfigError("dspark_target_layer_ids is given without dspark_block_size")
    elif c.num_nextn_predict_layers > 1:
        raise ConfigError(
            f"num_nextn_predict_layers is {c.num_nextn_predict_layers}; V4 has one MTP layer"
        )
