"""A backbone and its draft head together: one folder of weights holds both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from leadline.config.model import ModelConfig, load_model_config
from leadline.core.errors import CheckpointError
from leadline.tools.train_tiny.checkpoints import Progress, read_progress
from leadline.tools.train_tiny.draft import Draft
from leadline.tools.train_tiny.model import Transformer
from leadline.tools.train_tiny.recipes import RECIPES, Recipe
from leadline.tools.train_tiny.runs import fitted
from leadline.tools.train_tiny.starts import check_tokenizer, is_checkpoint, load_start


@dataclass(frozen=True, slots=True)
class Whole:
    """Everything that a checkpoint is made of.

    Attributes:
        recipe: that the weights were trained by.
        config: the recipe's, fitted to the data's tokenizer.
        backbone: with trained weights.
        draft: with trained weights if ``progress.has_draft``, else with random ones.
        progress: of the training.
    """

    recipe: Recipe
    config: ModelConfig
    backbone: Transformer
    draft: Draft
    progress: Progress

    def module(self) -> nn.Module:
        """Both as one module, in which parameters keep their official names."""
        return _joined(self.backbone, self.draft)


def load_whole(
    folder: Path, data: Path, *, dtype: torch.dtype = torch.float32, fused: bool = False
) -> Whole:
    """Read a ``weights`` folder of a stage or of the draft head's training, or a checkpoint.

    Args:
        folder: what ``save_weights`` wrote, or one in the official layout.
        data: the folder of data that it was trained on.
        dtype: see ``Transformer``.
        fused: likewise.

    Raises:
        CheckpointError: the folder holds no weights, or others than those of a recipe's model.
        ConfigError: ``data`` has no tokenizer.
    """
    progress = _progress(folder, data)
    recipe = RECIPES.get(progress.recipe)
    if recipe is None:
        raise CheckpointError(
            f"{folder}: of recipe {progress.recipe!r}; this version knows {', '.join(RECIPES)}"
        )
    config, token_map = fitted(recipe.config, data)
    backbone = Transformer(config, token_map, dtype=dtype, fused=fused)
    draft = Draft(config, dtype=dtype, fused=fused)
    model = _joined(backbone, draft) if progress.has_draft else backbone
    load_start(folder, model, config, data, recipe.name)
    return Whole(recipe, config, backbone, draft, progress)


def _progress(folder: Path, data: Path) -> Progress:
    """Of a checkpoint, its configuration tells the recipe, and nothing how long it took."""
    if not is_checkpoint(folder):
        return read_progress(folder)
    check_tokenizer(folder, data)
    found = load_model_config(folder)
    for recipe in RECIPES.values():
        if fitted(recipe.config, data)[0] == found:
            has_draft = found.num_nextn_predict_layers > 0
            return Progress(recipe.name, is_quantized=True, has_draft=has_draft)
    raise CheckpointError(
        f"{folder}: config.json is that of no recipe's model; there are {', '.join(RECIPES)}"
    )


def _joined(*modules: nn.Module) -> nn.Module:
    joined = nn.Module()
    for module in modules:
        for name, child in module.named_children():
            joined.add_module(name, child)
    return joined
