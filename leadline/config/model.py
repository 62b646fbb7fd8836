"""The official ``config.json`` of ``deepseek_v41`` as one frozen dataclass.

Field names are the official keys (v41-model 1.1 and 1.2), so that a reader can look any of them up
in the file. Everything that can be wrong with a configuration is found here, at start-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from leadline.config.keys import (
    as_object,
    collect,
    keys_to_json,
    missing_keys,
    read_json,
)
from leadline.config.rules import RopeScaling, check_common, check_targets
from leadline.core.errors import ConfigError, NotSupported

ARCHITECTURE = "DeepseekV41ForCausalLM"
MODEL_TYPE = "deepseek_v41"


class LayerMode(StrEnum):
    """What a layer attends to and what it owns (v41-model 2.5)."""

    WINDOW = "window"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How the checkpoint's weights are packed (v41-model 7.1)."""

    quant_method: str = "fp8"
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, ...] = (32, 32)
    scale_fmt: str = "ue8m0"
    expert_dtype: str = "fp4"


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower's numbers; kept so that nothing is lost, not used yet."""

    num_hidden_layers: int = 0
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """DeepSeek-V4.1: the text model's keys, with the top level's beside them.

    The comments give the symbol of v41-model section 0.
    """

    # Top level
    architectures: tuple[str, ...] = (ARCHITECTURE,)
    dtype: str = "bfloat16"
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int
    vision_config: VisionConfig | None = None
    quantization_config: QuantizationConfig | None = None

    # text_config
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
    routed_scaling_factor: float
    sliding_window: int  # W
    compress_ratios: tuple[int, ...]  # m_l; the draft stages' entries come last
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int  # Hi
    index_head_dim: int  # di
    index_topk: int  # K
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 0  # Kb
    candidate_block_size: int = 1  # Bb
    hc_mult: int  # S
    hc_sinkhorn_iters: int  # T_s
    hc_eps: float
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0  # M
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0

    # Derived once; not a key of the file.
    cut: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "cut", max(self.kv_source_layer_ids))

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed cache ``layer`` reads, or None for window-only layers."""
        return _source(self.kv_source_layer_ids, layer) if self.compress_ratios[layer] else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose selection ``layer`` uses, or None for window-only layers."""
        return _source(self.index_source_layer_ids, layer) if self.compress_ratios[layer] else None

    def mode(self, layer: int) -> LayerMode:
        """What ``layer`` owns (v41-model 2.5)."""
        if not self.compress_ratios[layer]:
            return LayerMode.WINDOW
        if layer in self.kv_source_layer_ids:
            return LayerMode.FULL
        if layer in self.index_source_layer_ids:
            return LayerMode.REINDEX
        return LayerMode.REUSE

    @property
    def engram_columns(self) -> int:
        """Hash columns (rows looked up) a token and Engram layer: orders x heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


def load_model_config(path: str | Path) -> ModelConfig:
    """Read ``config.json`` from a checkpoint folder, or from the file itself.

    Raises:
        ConfigError: the file is missing, is no JSON object, or breaks a rule of v41-model 1.2.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    return parse_model_config(read_json(file), where=str(file))


def parse_model_config(raw: Any, *, where: str = "config.json") -> ModelConfig:
    """Turn the official nested JSON into a ``ModelConfig``.

    Args:
        raw: the parsed file: top-level keys with ``text_config``, ``vision_config`` and
            ``quantization_config`` inside.
        where: what error messages call the file.

    Raises:
        ConfigError: one message naming the key.
        NotSupported: another architecture.
    """
    top = as_object(raw, where=where)
    model_type = top.pop("model_type", MODEL_TYPE)
    if model_type != MODEL_TYPE:
        raise NotSupported(f"{where}: model_type is {model_type!r}, not {MODEL_TYPE!r}")
    text = top.pop("text_config", None)
    if not isinstance(text, Mapping):
        raise ConfigError(f"{where}: text_config is missing or no object; V4.1 files nest it")
    sources = (("", top), ("text_config.", text))
    merged = collect(ModelConfig, sources, aliases=_ALIASES, where=where)
    missing = missing_keys(ModelConfig, merged)
    if missing:
        raise ConfigError(f"{where}: missing key(s) {', '.join(missing)} in text_config")
    try:
        return ModelConfig(**merged)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def model_config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The inverse of ``parse_model_config``: the official nested layout."""
    plain = keys_to_json(config)
    top_keys = ("architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id")
    top = {"architectures": plain["architectures"], "model_type": MODEL_TYPE}
    top |= {key: plain.pop(key) for key in (*top_keys, "image_token_id")}
    nested = {k: plain.pop(k) for k in ("quantization_config", "vision_config") if k in plain}
    if "vision_config" in nested:
        nested["vision_config"] = {"model_type": "deepseek_v41_vision", **nested["vision_config"]}
    return top | {"text_config": {"model_type": "deepseek_v41_text", **plain}} | nested


_ALIASES = {"torch_dtype": "dtype", "engram_pad_id": "engram_pad_token_id"}


def _source(sources: tuple[int, ...], layer: int) -> int:
    return max(source for source in sources if source <= layer)


def _check(c: ModelConfig) -> None:
    """The sanity rules of v41-model 1.2, and what the formulas need to make sense."""
    check_common(c, model="V4.1", architecture=ARCHITECTURE, quantization=QuantizationConfig())
    for name in ("head_dim", "index_head_dim"):
        if (width := getattr(c, name)) % 32:
            raise ConfigError(f"{name} is {width}; the cache formats need a multiple of 32")
    _check_schedule(c)
    _check_engram(c)
    _check_draft(c)


def _check_schedule(c: ModelConfig) -> None:
    layers, ratios = c.num_hidden_layers, c.compress_ratios
    if len(ratios) != layers + c.num_nextn_predict_layers:
        raise ConfigError(
            f"compress_ratios has {len(ratios)} entries; num_hidden_layers ({layers}) plus "
            f"num_nextn_predict_layers ({c.num_nextn_predict_layers}) need "
            f"{layers + c.num_nextn_predict_layers}"
        )
    if not c.kv_source_layer_ids:
        raise ConfigError("kv_source_layer_ids is empty; V4.1 needs at least one KV source")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(c, name)
        if list(ids) != sorted(set(ids)) or any(not 0 <= i < layers for i in ids):
            raise ConfigError(
                f"{name} is {list(ids)}; it must be ascending layer numbers below {layers}"
            )
    for layer, ratio in enumerate(ratios[:layers]):
        sources = [s for s in c.kv_source_layer_ids if s <= layer]
        if ratio and (not sources or ratios[sources[-1]] != ratio):
            found = f"layer {sources[-1]} with ratio {ratios[sources[-1]]}" if sources else "none"
            raise ConfigError(
                f"layer {layer} has compress ratio {ratio}, but its KV source is {found}; "
                "every compressed layer needs a KV source at or before it with the same ratio"
            )
    for source in (*c.kv_source_layer_ids, *c.index_source_layer_ids):
        if not ratios[source]:
            raise ConfigError(f"layer {source} is a KV or index source but its ratio is 0")
    for source in c.kv_source_layer_ids:
        if source not in c.index_source_layer_ids:
            raise ConfigError(f"KV source {source} is missing in index_source_layer_ids")
    source = c.candidate_source_layer_id
    if source >= 0:
        if source not in c.kv_source_layer_ids:
            raise ConfigError(f"candidate_source_layer_id is {source}, which is no KV source")
        if c.candidate_topk_blocks < 1 or c.candidate_block_size < 1:
            raise ConfigError("candidate_topk_blocks and candidate_block_size must be positive")


def _check_engram(c: ModelConfig) -> None:
    if len(c.engram_layer_ids) != len(c.engram_num_embeddings):
        raise ConfigError(
            f"engram_layer_ids has {len(c.engram_layer_ids)} entries, engram_num_embeddings "
            f"{len(c.engram_num_embeddings)}; they must match"
        )
    if not c.engram_layer_ids:
        return
    for name in ("vocab_size", "n_heads", "head_dim", "compressed_vocab_size"):
        if getattr(c, f"engram_{name}") < 1:
            raise ConfigError(f"engram_{name} must be positive where engram_layer_ids is given")
    if c.engram_max_ngram_size < 2:
        raise ConfigError(f"engram_max_ngram_size is {c.engram_max_ngram_size}; at least 2")
    if not 0 <= c.engram_pad_token_id < c.vocab_size:
        raise ConfigError(f"engram_pad_token_id is {c.engram_pad_token_id}, outside the vocabulary")


def _check_draft(c: ModelConfig) -> None:
    if not c.num_nextn_predict_layers:
        return
    if c.dspark_block_size < 1 or c.dspark_markov_rank < 1:
        raise ConfigError("dspark_block_size and dspark_markov_rank must be positive with drafts")
    if not 1 <= c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts:
        raise ConfigError("dspark_num_experts_per_tok must lie in 1..dspark_n_routed_experts")
    check_targets(c)
