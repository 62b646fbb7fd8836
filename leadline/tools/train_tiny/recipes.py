"""Recipes: what is trained, on what, for how long; stages follow one clock (study 4.1, 4.2)."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leadline.config.model import ModelConfig
from leadline.config.presets import TINY_22M
from leadline.core.errors import ConfigError
from leadline.models.deepseek_v41.engram import hash_primes
from leadline.tools.train_tiny.mixture import Mixture, Part
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
    balance_speed: float = 1e-3
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

    def changed(self, settings: Sequence[str]) -> Recipe:
        """With ``key=value`` settings applied.

        A key is a number of the recipe, or one of its stages, then of all of them, or
        ``mixture.FAMILY`` for a family's share.

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
    unknown = shares.keys() - mixture.keys()
    if unknown:
        raise ConfigError(
            f"--set mixture.{min(unknown)}: no such family; choose among {', '.join(mixture)}"
        )
    changed = {name: Part(shares.get(name, p.share), p.sizes) for name, p in mixture.items()}
    return {name: part for name, part in changed.items() if part.share > 0}


def for_tokenizer(config: ModelConfig, token_map: Sequence[int]) -> ModelConfig:
    """The configuration with the sizes that follow from a tokenizer.

    Args:
        config: any.
        token_map: n-gram class of each token id (``engram.compressed_token_map``).
    """
    return replace(
        config,
        vocab_size=len(token_map),
        engram_compressed_vocab_size=max(token_map) + 1,
        engram_num_embeddings=tuple(sum(row) for row in hash_primes(config)),
    )
