"""What DeepSeek-V4 and V4.1 have in common: YaRN's numbers, and rules of both their files."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from leadline.config.keys import to_json
from leadline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN parameters; frequencies only, no attention factor (v41-model 3.2)."""

    rope_type: str
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


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
_POSITIVE = (
    "vocab_size hidden_size num_hidden_layers moe_intermediate_size num_attention_heads "
    "head_dim qk_rope_head_dim q_lora_rank o_lora_rank o_groups max_position_embeddings "
    "n_routed_experts num_experts_per_tok sliding_window index_n_heads index_head_dim "
    "index_topk hc_mult hc_sinkhorn_iters rms_norm_eps hc_eps rope_theta compress_rope_theta "
    "swiglu_limit routed_scaling_factor"
)


def check_common(c: Any, *, model: str, architecture: str, quantization: Any) -> None:
    """The sanity rules of both models, and what the formulas need to make sense.

    Args:
        c: a model's configuration.
        model: what messages call the model.
        architecture: must be among those that ``c`` names.
        quantization: the only packing that the model is defined for; ``c`` may have none.

    Raises:
        ConfigError: a key breaks a rule.
    """
    if architecture not in c.architectures:
        raise ConfigError(f"architectures is {list(c.architectures)}; it must name {architecture}")
    for name, wanted in _CHOICES.items():
        if getattr(c, name) != wanted:
            raise ConfigError(f"{name} is {getattr(c, name)!r}; {model} is defined for {wanted!r}")
    packing = c.quantization_config or quantization
    for item in dataclasses.fields(quantization):
        found, wanted = (getattr(p, item.name) for p in (packing, quantization))
        if found != wanted:
            raise ConfigError(
                f"quantization_config.{item.name} is {to_json(found)!r}; {model} is defined for "
                f"{to_json(wanted)!r}"
            )
    for name in _POSITIVE.split():
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
    if c.rope_scaling.rope_type != "yarn":
        raise ConfigError(f"rope_scaling.rope_type is {c.rope_scaling.rope_type!r}; only 'yarn'")
    for layer, ratio in enumerate(c.compress_ratios[: c.num_hidden_layers]):
        if ratio < 0:
            raise ConfigError(f"compress_ratios[{layer}] is {ratio}; it must not be negative")
    if any(c.compress_ratios[c.num_hidden_layers :]):
        raise ConfigError("compress_ratios of the draft stages (the last entries) must be 0")


def check_targets(c: Any) -> None:
    """DSpark's features come from layers that there are.

    Raises:
        ConfigError: one comes from elsewhere.
    """
    if any(not 0 <= i < c.num_hidden_layers for i in c.dspark_target_layer_ids):
        raise ConfigError("dspark_target_layer_ids must be layer numbers of the backbone")
