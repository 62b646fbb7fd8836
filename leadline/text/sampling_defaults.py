"""What sampling a request gets that says nothing of it, over HTTP and offline (5.1, 9.1, 9.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leadline.config.server import ChatConfig
from leadline.text.chat import ChatPrompt

# Sampling values that ``generation_config.json`` and its override may hold.
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


def sampling_defaults(options: ChatConfig) -> dict[str, Any]:
    """``SamplingParams`` fields that ``--override-generation-config`` sets."""
    overrides = options.override_generation_config or {}
    return {name: overrides[name] for name in _OVERRIDABLE if name in overrides}


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
