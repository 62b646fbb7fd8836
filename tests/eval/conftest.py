"""A small random model, and a suite of a few dialogues for it."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from leadline.cli import bundled_model
from leadline.config.model import load_model_config
from leadline.config.presets import TINY_WINDOW128
from leadline.eval.questions import Dialogue, as_dialogue
from leadline.eval.tasks import FAMILIES
from leadline.text.encoding import ChatEncoder
from leadline.text.tokenizer import Tokenizer
from leadline.tools.random_checkpoint import write_random_checkpoint

WINDOW = 16


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of layer, a short window, and the bundled model's tokenizer and tables."""
    bundled = load_model_config(bundled_model())
    of_tokenizer = {
        name: getattr(bundled, name)
        for name in (
            "vocab_size",
            "image_token_id",
            "engram_vocab_size",
            "engram_num_embeddings",
            "engram_compressed_vocab_size",
            "engram_n_heads",
            "engram_head_dim",
        )
    }
    config = dataclasses.replace(
        TINY_WINDOW128,
        **of_tokenizer,
        hidden_size=64,
        num_attention_heads=4,
        sliding_window=WINDOW,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        compress_ratios=TINY_WINDOW128.compress_ratios[:8],
    )
    folder: Path = tmp_path_factory.mktemp("model")
    tokenizer = bundled_model() / "tokenizer.json"
    write_random_checkpoint(folder, config, tokenizer=tokenizer)
    return folder


@pytest.fixture(scope="session")
def encoder(tokenizer: Tokenizer) -> ChatEncoder:
    return ChatEncoder(tokenizer)


@pytest.fixture(scope="session")
def dialogues(encoder: ChatEncoder) -> list[Dialogue]:
    """Two conversations of two turns."""
    make = FAMILIES["multi_turn"].make
    chats = [make(random.Random(i), 120, thinking=False, num_turns=2) for i in range(2)]
    return [as_dialogue(chat, i, encoder) for i, chat in enumerate(chats)]
