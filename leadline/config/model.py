"""The official ``config.json`` of ``deepseek_v41`` as one frozen dataclass.

Field names are the official keys (v41-model 1.1 and 1.2), so that a reader can look any of them up
in the file. Everything that can be wrong with a configuration is found here, at start-up.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from leadline.core.errors import ConfigError, NotSupported

logger = logging.getLogger(__name__)

ARCHITECTURE = "DeepseekV41ForCausalLM"
MODEL_TYPE = "deepseek_v41"


class LayerMode(StrEnum):
    """What a layer attends to and what it owns (v41-model 2.5)."""

    WINDOW = "window"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN parameters; frequencies only, no attention factor (v41-model 3.2)."""

    rope_type: str
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


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
    return parse_model_config(_read(file), where=str(file))


def read_model_type(folder: Path) -> str:
    """Which model a checkpoint folder holds, as its ``config.json`` says.

    Raises:
        ConfigError: the file is missing or no JSON object.
    """
    return str(read_object(folder / "config.json").get("model_type", MODEL_TYPE))


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        ConfigError: the file is missing or no JSON object.
    """
    raw = _read(file)
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: must hold a JSON object, not {type(raw).__name__}")
    return raw


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from error


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
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: must hold a JSON object, not {type(raw).__name__}")
    top = dict(raw)
    model_type = top.pop("model_type", MODEL_TYPE)
    if model_type != MODEL_TYPE:
        raise NotSupported(
            f"{where}: model_type is {model_type!r}; this version serves {MODEL_TYPE!r} only"
        )
    text = top.pop("text_config", None)
    if not isinstance(text, Mapping):
        raise ConfigError(f"{where}: text_config is missing or no object; V4.1 files nest it")
    merged: dict[str, Any] = {}
    for source, prefix in ((top, ""), (text, "text_config.")):
        for key, value in source.items():
            name = _ALIASES.get(key, key)
            if name in _IGNORED:
                continue
            if name not in _KEYS:
                _warn_unknown(f"{where}: unknown key {prefix}{key} is ignored")
                continue
            merged[name] = _convert(_KEYS[name], value, f"{where}: {prefix}{key}")
    missing = [f.name for f in dataclasses.fields(ModelConfig) if _is_required(f)]
    missing = [name for name in missing if name not in merged]
    if missing:
        raise ConfigError(f"{where}: missing key(s) {', '.join(missing)} in text_config")
    try:
        return ModelConfig(**merged)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def model_config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The inverse of ``parse_model_config``: the official nested layout."""
    flat = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init}
    plain = {key: _plain(value) for key, value in flat.items() if value is not None}
    top_keys = ("architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id")
    top = {"architectures": plain["architectures"], "model_type": MODEL_TYPE}
    top |= {key: plain.pop(key) for key in (*top_keys, "image_token_id")}
    nested = {k: plain.pop(k) for k in ("quantization_config", "vision_config") if k in plain}
    if "vision_config" in nested:
        nested["vision_config"] = {"model_type": "deepseek_v41_vision", **nested["vision_config"]}
    return top | {"text_config": {"model_type": "deepseek_v41_text", **plain}} | nested


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {k: _plain(v) for k, v in dataclasses.asdict(value).items()}
    return list(value) if isinstance(value, tuple) else value


_ALIASES = {"torch_dtype": "dtype", "engram_pad_id": "engram_pad_token_id"}
# Keys that describe the file or the program that wrote it, not the model.
_IGNORED = {"model_type", "transformers_version", "auto_map", "_name_or_path"}
_KEYS: dict[str, Any] = {
    name: hint for name, hint in typing.get_type_hints(ModelConfig).items() if name != "cut"
}


def _is_required(item: dataclasses.Field[Any]) -> bool:
    return item.init and item.default is dataclasses.MISSING


@functools.cache  # once per message
def _warn_unknown(message: str) -> None:
    logger.warning(message)


def _convert(hint: Any, value: Any, name: str) -> Any:
    """Check a JSON value against a type hint; lists become tuples, objects dataclasses."""
    if isinstance(hint, types.UnionType):
        if value is None and type(None) in hint.__args__:
            return None
        (hint,) = (arg for arg in hint.__args__ if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name} is {value!r}; it must be a list")
        inner = typing.get_args(hint)[0]
        return tuple(_convert(inner, item, f"{name}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return _convert_object(hint, value, name)
    accepts = {float: (int, float)}.get(hint, hint)
    if not isinstance(value, accepts) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{name} is {value!r}; it must be of type {hint.__name__}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}; it must be finite")
    return hint(value)


def _convert_object(hint: Any, value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; it must be an object")
    hints = typing.get_type_hints(hint)
    known = {}
    for key, item in value.items():
        if key in hints:
            known[key] = _convert(hints[key], item, f"{name}.{key}")
        elif key != "model_type":
            _warn_unknown(f"{name}: unknown key {key} is ignored")
    for item in dataclasses.fields(hint):
        if item.default is dataclasses.MISSING and item.name not in known:
            raise ConfigError(f"{name}: missing key {item.name}")
    return hint(**known)


def _source(sources: tuple[int, ...], layer: int) -> int:
    return max(source for source in sources if source <= layer)


_CHOICES = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def _check(c: ModelConfig) -> None:
    """The sanity rules of v41-model 1.2, and what the formulas need to make sense."""
    if ARCHITECTURE not in c.architectures:
        raise ConfigError(f"architectures is {list(c.architectures)}; it must name {ARCHITECTURE}")
    for name, wanted in _CHOICES.items():
        if getattr(c, name) != wanted:
            raise ConfigError(f"{name} is {getattr(c, name)!r}; V4.1 is defined for {wanted!r}")
    packing = c.quantization_config or QuantizationConfig()
    for item in dataclasses.fields(packing):
        if getattr(packing, item.name) != item.default:
            raise ConfigError(
                f"quantization_config.{item.name} is {_plain(getattr(packing, item.name))!r}; "
                f"V4.1 is defined for {_plain(item.default)!r}"
            )
    positive = (
        "vocab_size hidden_size num_hidden_layers moe_intermediate_size num_attention_heads "
        "head_dim qk_rope_head_dim q_lora_rank o_lora_rank o_groups max_position_embeddings "
        "n_routed_experts num_experts_per_tok sliding_window index_n_heads index_head_dim "
        "index_topk hc_mult hc_sinkhorn_iters rms_norm_eps hc_eps rope_theta compress_rope_theta "
        "swiglu_limit routed_scaling_factor"
    )
    for name in positive.split():
        if getattr(c, name) <= 0:
            raise ConfigError(f"{name} is {getattr(c, name)}; it must be positive")
    if c.num_nextn_predict_layers < 0:
        raise ConfigError(f"num_nextn_predict_layers is {c.num_nextn_predict_layers}; below 0")
    if c.num_experts_per_tok > c.n_routed_experts:
        raise ConfigError(
            f"num_experts_per_tok is {c.num_experts_per_tok}, more than n_routed_experts "
            f"({c.n_routed_experts})"
        )
    if c.num_attention_heads % c.o_groups:
        raise ConfigError(
            f"num_attention_heads is {c.num_attention_heads}, not a multiple of o_groups "
            f"({c.o_groups})"
        )
    for name in ("head_dim", "index_head_dim"):
        width = getattr(c, name)
        if c.qk_rope_head_dim > width or c.qk_rope_head_dim % 2:
            raise ConfigError(
                f"qk_rope_head_dim is {c.qk_rope_head_dim}; it must be even and at most {name} "
                f"({width})"
            )
        if width % 32:
            raise ConfigError(f"{name} is {width}; the cache formats need a multiple of 32")
    if c.rope_scaling.rope_type != "yarn":
        raise ConfigError(f"rope_scaling.rope_type is {c.rope_scaling.rope_type!r}; only 'yarn'")
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
    if any(ratios[layers:]):
        raise ConfigError("compress_ratios of the draft stages (the last entries) must be 0")
    if not c.kv_source_layer_ids:
        raise ConfigError("kv_source_layer_ids is empty; V4.1 needs at least one KV source")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(c, name)
        if list(ids) != sorted(set(ids)) or any(not 0 <= i < layers for i in ids):
            raise ConfigError(
                f"{name} is {list(ids)}; it must be ascending layer numbers below {layers}"
            )
    for layer, ratio in enumerate(ratios[:layers]):
        if ratio < 0:
            raise ConfigError(f"compress_ratios[{layer}] is {ratio}; it must not be negative")
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
    if any(not 0 <= i < c.num_hidden_layers for i in c.dspark_target_layer_ids):
        raise ConfigError("dspark_target_layer_ids must be layer numbers of the backbone")
