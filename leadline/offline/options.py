"""Keyword arguments of ``LLM`` and ``AsyncLLM``: the flags of the server by their own names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leadline.config import compat
from leadline.config.args import closest, from_values, settings
from leadline.config.engine import EngineConfig
from leadline.config.optimization import make_engine_config
from leadline.config.presets import PRESETS
from leadline.config.server import ChatConfig
from leadline.text.tokenizer import Tokenizer
from leadline.weights.checkpoint import resolve_checkpoint

# Of ``ChatConfig``: what decides prompts of chats, constraints on answers, and the sampling of
# those who say nothing of it.
CHAT_OPTIONS = (
    "effort_profile",
    *compat.CHAT_FORMAT,
    "v4_inline_system",
    "default_chat_template_kwargs",
    "strict_tool_history",
    "tool_strict_level",
    "default_max_tokens",
    "generation_config",
    "override_generation_config",
)


def read_options(model: str | Path, options: Mapping[str, Any]) -> tuple[EngineConfig, ChatConfig]:
    """The settings that keyword arguments make.

    Raises:
        TypeError: an option of an unknown name.
        ConfigError: a value that cannot be used.
    """
    known = [*(setting.name for setting in settings(EngineConfig)), *CHAT_OPTIONS]
    for name in options:
        if name not in known and name not in compat.NAMES:
            hint = closest(name, [*known, "tokenizer", "skip_tokenizer_init"])
            raise TypeError(f"unexpected keyword argument {name!r}{hint}")
    # Nobody else asks this engine, so a list of prompts may be as long as it is.
    values = {"max_num_queued_reqs": 0, **compat.settle(options), "model": str(model)}
    return make_engine_config(values), from_values(ChatConfig, values)


def checkpoint_folder(config: EngineConfig) -> Path | None:
    """Where the model's files are; a preset has none.

    Raises:
        ConfigError: the model is neither a folder nor a hub id.
        CheckpointError: the hub does not have it.
    """
    if config.load_format == "dummy" and config.model in PRESETS:
        return None
    return resolve_checkpoint(config.model, config.revision)


def load_tokenizer(tokenizer: str | Path | None, folder: Path | None) -> Tokenizer | None:
    """The named one, else the checkpoint's; None where there is neither.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = Path(tokenizer) if tokenizer else folder
    if path is None:
        return None
    return Tokenizer(path / "tokenizer.json" if path.is_dir() else path)
