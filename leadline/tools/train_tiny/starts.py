"""What training goes on from: the weights of a stage, or a checkpoint as it is served."""

from __future__ import annotations

import dataclasses
import filecmp
from pathlib import Path

from torch import nn

from leadline.config.model import ModelConfig, load_model_config
from leadline.core.errors import CheckpointError
from leadline.tools.train_tiny import official
from leadline.tools.train_tiny.checkpoints import Progress, load_weights


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is in the official layout, and not one of weights that a stage wrote."""
    return (folder / "config.json").is_file()


def load_start(
    folder: Path, model: nn.Module, config: ModelConfig, data: Path, recipe: str
) -> Progress:
    """Give a model the values that it goes on from, exactly.

    Args:
        folder: ``weights`` of a stage, or a checkpoint in the official layout.
        model: a backbone, a draft head or both, of ``config``.
        config: the recipe's, fitted to the tokenizer of ``data``.
        data: the folder of data; its ids must mean what those of a checkpoint mean.
        recipe: its name.

    Returns:
        How far training had come; of a checkpoint that is not known.

    Raises:
        CheckpointError: the tokenizers or the models differ, or a tensor is missing.
    """
    if not is_checkpoint(folder):
        return load_weights(folder, model)
    check_tokenizer(folder, data)
    found = load_model_config(folder)
    for field in dataclasses.fields(ModelConfig):
        has, needs = getattr(found, field.name), getattr(config, field.name)
        if has != needs:
            raise CheckpointError(
                f"{folder}: {field.name} is {has} in config.json, the recipe's model needs {needs};"
                " go on by the recipe that the checkpoint was trained by"
            )
    values = official.read(folder, config)
    model.load_state_dict({name: values[name] for name in model.state_dict()})
    return Progress(recipe, is_quantized=True)


def check_tokenizer(folder: Path, data: Path) -> None:
    """Compare the tokenizers of a checkpoint and of a folder of data, byte for byte.

    Raises:
        CheckpointError: they differ, or one is missing.
    """
    own, other = folder / "tokenizer.json", data / "tokenizer.json"
    for file in (own, other):
        if not file.is_file():
            raise CheckpointError(f"{file}: not found; training needs the checkpoint's tokenizer")
    if not filecmp.cmp(own, other, shallow=False):
        raise CheckpointError(
            f"{other}: differs from {own}, so ids and Engram rows mean something else; build the "
            f"data folder again with 'data --tokenizer {own}'"
        )
