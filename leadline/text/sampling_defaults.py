"""What sampling a request gets that says nothing of it, wherever it comes from (5.1, 9.1, 9.2)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from leadline.config.keys import read_object
from leadline.config.server import ChatConfig
from leadline.core.errors import BadRequest, ConfigError
from leadline.core.request import SamplingParams
from leadline.text.chat import ChatPrompt

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
# Sampling values that this file and its override may hold; what else stands there is for others.
_OVERRIDABLE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_MIN_THINKING_TOP_P = 0.95  # the cloud's, with thinking


def with_generation_config(options: ChatConfig, folder: Path | None) -> ChatConfig:
    """The options with a checkpoint's own sampling values beneath those of the override.

    A line in the log says what there is.

    Args:
        options: ``generation_config`` says which file: ``auto`` is the checkpoint's, which may have
            none, ``vllm`` is none, else it is a folder that must have one.
        folder: the checkpoint; None has no files.

    Raises:
        ConfigError: the file cannot be read, or a value cannot be used.
    """
    setting = options.generation_config
    source = folder if setting == "auto" else None if setting == "vllm" else Path(setting)
    found: dict[str, Any] = {}
    if source is not None:
        file = source / GENERATION_CONFIG
        if setting != "auto" or file.is_file():
            found = read_object(file)
            logger.info("sampling defaults from %s: %s", file, found)
    merged = {**found, **(options.override_generation_config or {})}
    options = replace(options, override_generation_config=merged)
    try:
        with_end_tokens(SamplingParams(**sampling_defaults(options)), options)
    except (BadRequest, TypeError) as error:
        raise ConfigError(
            f"a default of {GENERATION_CONFIG} or --override-generation-config: {error}"
        ) from error
    return options


def sampling_defaults(options: ChatConfig) -> dict[str, Any]:
    """``SamplingParams`` fields that the options set for requests that leave them out."""
    overrides = options.override_generation_config or {}
    return {name: overrides[name] for name in _OVERRIDABLE if overrides.get(name) is not None}


def with_end_tokens(sampling: SamplingParams, options: ChatConfig) -> SamplingParams:
    """Parameters that also end where the options' ``eos_token_id`` says, an id or several."""
    ends = (options.override_generation_config or {}).get("eos_token_id")
    if ends is None or sampling.ignore_eos:
        return sampling
    ends = (ends,) if isinstance(ends, int) else tuple(ends)
    return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *ends))


def thinking_policy(
    given: Mapping[str, Any], prompt: ChatPrompt, options: ChatConfig, *, is_v4: bool
) -> dict[str, Any]:
    """Sampling fields of a chat under ``--sampling-policy`` (serving-api 9.2, C40).

    ``honour`` only fills what the request leaves open; ``deepseek`` replaces, without an error,
    what the cloud does not honour.
    """
    cloud: dict[str, Any] = {}
    if prompt.thinking:
        cloud = {"temperature": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        if is_v4:
            cloud["top_p"] = _MIN_THINKING_TOP_P if prompt.tools else 1.0
        else:
            cloud["top_p"] = 1.0
            if options.sampling_policy == "deepseek":
                cloud["top_p"] = max(_MIN_THINKING_TOP_P, given.get("top_p", 1.0))
    elif not is_v4:
        cloud = {"top_p": 1.0}
    if options.sampling_policy == "deepseek":
        return {**given, **cloud}
    overrides = options.override_generation_config or {}
    defaults = {name: value for name, value in cloud.items() if name not in overrides}
    return {**defaults, **given}


def default_chat_limit(prompt: ChatPrompt, options: ChatConfig, max_model_len: int) -> int:
    """Output limit of a chat that sets none: ``--default-max-tokens`` (serving-api 5.1).

    It may be more than the context leaves.
    """
    overrides = options.override_generation_config or {}
    if (limit := overrides.get("max_new_tokens")) is not None:
        return int(limit)
    choice = options.default_max_tokens
    if choice == "deepseek":
        return prompt.default_max_tokens(max_model_len)
    return max_model_len if choice == "remaining" else int(choice)
