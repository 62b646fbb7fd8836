"""Trained weights -> the folder that is served: ``python -m leadline.tools.train_tiny export``."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import torch

from leadline.tools.train_tiny import official
from leadline.tools.train_tiny.data import NOTICE
from leadline.tools.train_tiny.whole import load_whole

logger = logging.getLogger(__name__)

# What requests get that say nothing: a small model wanders off unless it is greedy, and what it
# was trained on is shorter.
GENERATION_CONFIG = {"temperature": 0.0, "max_new_tokens": 1024}


def export_checkpoint(weights: Path, data: Path, out: Path) -> None:
    """Write a checkpoint in the official mixed layout, two shards, with tokenizer and notices.

    A draft head that was not trained has random weights: drafts are then hardly ever accepted,
    but the files are whole.

    Args:
        weights: a ``weights`` folder of a stage or of the draft head's training, or a checkpoint.
        data: the folder of data that it was trained on.
        out: the folder; must not hold a checkpoint already.

    Raises:
        CheckpointError: ``weights`` holds none of a recipe's model.
        ConfigError: ``out`` holds a checkpoint, or ``data`` has no tokenizer.
    """
    torch.manual_seed(0)
    whole = load_whole(weights, data)
    if whole.config.num_nextn_predict_layers and not whole.progress.has_draft:
        logger.warning(
            "%s: has no trained draft head; the checkpoint gets a random one, whose drafts are "
            "hardly ever accepted. Train one with the command 'draft'.",
            weights,
        )
    parameters = whole.module().state_dict()
    official.export(out, whole.config, parameters, tokenizer=data / "tokenizer.json")
    text = json.dumps(GENERATION_CONFIG, indent=2) + "\n"
    (out / "generation_config.json").write_text(text, encoding="utf-8")
    if (data / NOTICE).is_file():  # data of text files alone has none
        shutil.copy(data / NOTICE, out)
