"""Recipes: what is trained, on what, for how long; stages follow one clock (study 4.1, 4.2)."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leadline.config.model import ModelConfig, QuantizationConfig, VisionConfig
from leadline.config.presets import TINY_22M
from leadline.config.rules import RopeScaling
from leadline.core.errors import ConfigError
from leadline.tools.train_tiny.mixture import Mixture, Part
from leadline.tools.train_tiny.mixtures import EARLY, LAST, LATE, PASSAGES, SHORT, WEAK
from leadline.tools.train_tiny.model import Phase

NEVER = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run of the trainer. Progress is the share of its seconds, or of its steps, gone by.

    Attributes:
        seconds: from the start of the command to its end, evaluation and saving included.
        max_steps: the stage ends after so many optimiser steps too.
        seq_len: S of a batch.
        tokens_per_step: of one optimiser step, over all replicas.
        early_tokens: the same, until progress ``early_until``: more steps while all is new.
        early_until: see there.
        micro_tokens: of one forward pass; B x S. What fits the memory.
        sparse_from: progress from which only selected entries are attended.
        quantize_from: progress from which weights, caches and activations are quantised.
        index_from: step from which the indexers are trained.
        lr_start: factor of the learning rates until ``decay_from``.
        decay_from: progress from which the factor falls, linearly.
        lr_end: the factor at the end.
        mixture: family -> share of the tokens and sizes.
    """

    seconds: float = math.inf
    max_steps: float = math.inf
    seq_len: int
    tokens_per_step: int
    early_tokens: int
    early_until: float = 0.0
    micro_tokens: int
    sparse_from: float = NEVER
    quantize_from: float = NEVER
    index_from: int = 0
    lr_start: float = 1.0
    decay_from: float = 1.0
    lr_end: float = 1.0
    mixture: Mixture

    def __post_init__(self) -> None:
        for name in ("tokens_per_step", "early_tokens"):
            if getattr(self, name) % self.micro_tokens:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be a multiple of micro_tokens "
                    f"({self.micro_tokens})"
                )
        if self.micro_tokens % self.seq_len:
            raise ConfigError(
                f"micro_tokens is {self.micro_tokens}; it must be a multiple of seq_len "
                f"({self.seq_len})"
            )
        if self.seconds == self.max_steps == math.inf:
            raise ConfigError("a stage needs seconds or max_steps, or it never ends")

    @property
    def rows(self) -> int:
        """B of a batch."""
        return self.micro_tokens // self.seq_len

    def phase(self, progress: float, step: int) -> Phase:
        """What is switched on."""
        return Phase(
            sparse=progress >= self.sparse_from,
            quantize=progress >= self.quantize_from,
            index_loss=step >= self.index_from,
        )

    def tokens(self, progress: float) -> int:
        """Tokens of the next step."""
        return self.early_tokens if progress < self.early_until else self.tokens_per_step

    def lr_factor(self, progress: float) -> float:
        """What the learning rates are multiplied with: flat, then falling (WSD)."""
        if progress < self.decay_from:
            return self.lr_start
        gone = min(1.0, (progress - self.decay_from) / max(1e-9, 1.0 - self.decay_from))
        return self.lr_start + (self.lr_end - self.lr_start) * gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that a run follows from, but the data folder.

    Attributes:
        name: what the command line calls it.
        config: the model; ``for_tokenizer`` fits it to the data's tokenizer.
        stages: in order; the first starts from random weights.
        muon_lr: peak, of the matrices.
        adamw_lr: peak, of the rest.
        weight_decay: of the matrices.
        max_gradient_norm: over all gradients of a step.
        index_weight: of the indexers' own loss in the sum.
        balance_speed: step of the experts' bias.
        warmup_steps: of the learning rate, where the optimiser starts afresh.
        log_steps: between lines of the log.
        validate_seconds: between evaluations on held-out batches, each followed by a checkpoint.
        seed: of weights and data.
    """

    name: str
    config: ModelConfig
    stages: tuple[Stage, ...]
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    index_weight: float = 1.0
    balance_speed: float = 0.01
    warmup_steps: int = 100
    log_steps: int = 20
    validate_seconds: float = 60.0
    seed: int = 0

    def stage(self, number: int) -> Stage:
        """Stage ``number``, from 1.

        Raises:
            ConfigError: there is none.
        """
        if not 1 <= number <= len(self.stages):
            raise ConfigError(
                f"stage is {number}; recipe {self.name!r} has stages 1 to {len(self.stages)}"
            )
        return self.stages[number - 1]

    def settings(self, stage: Stage) -> dict[str, Any]:
        """The numbers of the recipe and of one stage, as ``changed`` takes them, for the log."""
        numbers = {name: getattr(self, name) for name in _RECIPE_NUMBERS}
        numbers |= {name: getattr(stage, name) for name in _STAGE_NUMBERS}
        numbers |= {f"mixture.{name}": part.share for name, part in stage.mixture.items()}
        return {name: value for name, value in numbers.items() if math.isfinite(value)}

    def changed(self, settings: Sequence[str]) -> Recipe:
        """With ``key=value`` settings applied.

        A key is a number of the recipe, or one of its stages, then of all of them, or
        ``mixture.FAMILY`` for a family's share, in the stages that have it.

        Raises:
            ConfigError: an unknown key, or a value that does not fit.
        """
        of_recipe: dict[str, Any] = {}
        of_stages: dict[str, Any] = {}
        shares: dict[str, float] = {}
        for setting in settings:
            key, _, text = setting.partition("=")
            if key.startswith("mixture."):
                shares[key.removeprefix("mixture.")] = _parse(float, setting, text)
            elif key in _RECIPE_NUMBERS:
                of_recipe[key] = _parse(_RECIPE_NUMBERS[key], setting, text)
            elif key in _STAGE_NUMBERS:
                of_stages[key] = _parse(_STAGE_NUMBERS[key], setting, text)
            else:
                known = ", ".join((*_RECIPE_NUMBERS, *_STAGE_NUMBERS, "mixture.FAMILY"))
                raise ConfigError(f"--set {setting}: unknown key {key!r}; choose among {known}")
        known_families = dict.fromkeys(name for stage in self.stages for name in stage.mixture)
        unknown = shares.keys() - known_families.keys()
        if unknown:
            raise ConfigError(
                f"--set mixture.{min(unknown)}: no such family; choose among "
                f"{', '.join(known_families)}"
            )
        stages = (
            replace(stage, mixture=_with_shares(stage.mixture, shares), **of_stages)
            for stage in self.stages
        )
        return replace(self, stages=tuple(stages), **of_recipe)


def _numbers(of: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(of)
    return {name: kind for name, kind in hints.items() if kind in (int, float)}


_RECIPE_NUMBERS = _numbers(Recipe)
_STAGE_NUMBERS = _numbers(Stage)


def _parse(kind: Any, setting: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"--set {setting}: {text!r} is no {kind.__name__}") from None


def _with_shares(mixture: Mixture, shares: Mapping[str, float]) -> Mixture:
    """Families with a share of 0 are left out."""
    changed = {name: Part(shares.get(name, p.share), p.sizes) for name, p in mixture.items()}
    return {name: part for name, part in changed.items() if part.share > 0}


# Vendor's mechanisms at the smallest size that has them all: a decoder of four layers, so that
# bounded replay is not exact, with a candidate source and a layer that selects again.
REHEARSAL_CONFIG = ModelConfig(
    image_token_id=60,
    vision_config=VisionConfig(num_hidden_layers=0),
    quantization_config=QuantizationConfig(),
    vocab_size=1024,
    hidden_size=64,
    num_hidden_layers=6,
    moe_intermediate_size=32,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=16,
    q_lora_rank=64,
    o_lora_rank=32,
    o_groups=2,
    swiglu_limit=10.0,
    rms_norm_eps=1e-20,
    max_position_embeddings=4096,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=RopeScaling("yarn", 4.0, 32.0, 1.0, 1024),
    n_routed_experts=8,
    num_experts_per_tok=2,
    routed_scaling_factor=1.5,
    sliding_window=16,
    compress_ratios=(0, 2, 1, 1, 1, 1) + (0,) * 2,
    kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2, 4),
    index_n_heads=2,
    index_head_dim=32,
    index_topk=16,
    candidate_source_layer_id=2,
    candidate_topk_blocks=8,
    candidate_block_size=8,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    engram_layer_ids=(1,),
    engram_num_embeddings=(2164,),
    engram_max_ngram_size=3,
    engram_vocab_size=512,
    engram_n_heads=2,
    engram_head_dim=32,
    engram_compressed_vocab_size=800,
    num_nextn_predict_layers=2,
    dspark_block_size=5,
    dspark_noise_token_id=62,
    dspark_target_layer_ids=(3, 4, 5),
    dspark_markov_rank=32,
    dspark_n_routed_experts=4,
    dspark_num_experts_per_tok=1,
)


# Rounded as when served, and attending to what the indexers select.
_SERVED_STAGE = Stage(
    seconds=480,
    seq_len=2048,
    tokens_per_step=65536,
    early_tokens=65536,
    micro_tokens=65536,
    sparse_from=0.0,
    quantize_from=0.0,
    lr_start=0.5,
    lr_end=0.5,
    mixture=WEAK,
)
H200 = Recipe(
    name="h200",
    config=TINY_22M,
    validate_seconds=100.0,
    # The rows of the first two stages are alike: documents are short at first, whatever the rows,
    # and compiled code serves both. The others go on from the model that these have made: short
    # rows, which train faster, then the longest documents that the model is to be good at.
    stages=(
        Stage(
            seconds=440,
            seq_len=4096,
            tokens_per_step=65536,
            early_tokens=65536,
            micro_tokens=65536,
            index_from=200,
            sparse_from=0.8,
            mixture=EARLY,
        ),
        replace(
            _SERVED_STAGE,
            seconds=340,
            seq_len=4096,
            lr_start=1.0,
            decay_from=0.0,
            lr_end=0.02,
            mixture=LATE,
        ),
        _SERVED_STAGE,
        replace(
            _SERVED_STAGE,
            seq_len=8192,
            micro_tokens=32768,  # products of index queries and keys stay below 2^31
            decay_from=0.0,
            lr_end=0.02,
            mixture=LAST,
        ),
    ),
)

_SMALL_STAGE = Stage(
    max_steps=400,
    seq_len=256,
    tokens_per_step=2048,
    early_tokens=2048,
    micro_tokens=2048,
    mixture=PASSAGES,
)
REHEARSAL = Recipe(
    name="rehearsal",
    config=REHEARSAL_CONFIG,
    stages=(
        replace(_SMALL_STAGE, index_from=20),
        replace(
            _SMALL_STAGE,
            max_steps=200,
            seq_len=512,
            sparse_from=0.4,
            decay_from=0.7,
            lr_end=0.6,
            mixture=SHORT,
        ),
        replace(
            _SMALL_STAGE,
            max_steps=100,
            seq_len=512,
            sparse_from=0.0,
            quantize_from=0.0,
            lr_start=0.6,
            decay_from=0.0,
            lr_end=0.02,
            mixture=SHORT,
        ),
    ),
    warmup_steps=20,
    log_steps=10,
)

RECIPES = {recipe.name: recipe for recipe in (H200, REHEARSAL)}
"""All recipes by name."""
