"""Flags that vLLM's users have in their scripts and that have nothing to switch here.

They are accepted with one warning each; values that ask for something that does not exist are
refused by name (serving-api 15.1).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from typing import Any

from leadline.core.errors import NotSupported

logger = logging.getLogger(__name__)

PARSER = "deepseek_v41"

# setting -> why it has no effect
SWITCHES = {
    "trust_remote_code": "no code is ever loaded from a checkpoint",
    "enable_chunked_prefill": "prefill is always chunked",
    "async_scheduling": "the engine schedules by itself",
    "enforce_eager": "there are no graphs to turn off",
    "disable_log_requests": "requests are logged without their text unless asked for",
    "enable_auto_tool_choice": "it is always on",
    "enable_prompt_tokens_details": "they are always sent",
    "language_model_only": "images are not served",
}
VALUES = {
    "compilation_config": "nothing is compiled",
    "attention_backend": "there is one",
    "moe_backend": "there is one",
    "swap_space": "pages are not swapped out",
    "tokenizer_mode": "the checkpoint's tokenizer.json is used",
}
# setting -> (short form, the only value, what another value would need)
FIXED = {
    "tensor_parallel_size": ("-tp", 1, "tensor parallelism"),
    "pipeline_parallel_size": ("-pp", 1, "pipeline parallelism"),
    "data_parallel_size": ("-dp", 1, "data parallelism"),
}
PARSERS = ("reasoning_parser", "tool_call_parser")
NAMES = (*SWITCHES, *VALUES, *FIXED, *PARSERS)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Accept the flags, without showing them in ``--help``."""
    for name in SWITCHES:
        parser.add_argument(
            _flag(name), action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS
        )
    for name in (*VALUES, *PARSERS):
        parser.add_argument(_flag(name), help=argparse.SUPPRESS)
    for name, (short, _, _) in FIXED.items():
        parser.add_argument(short, _flag(name), type=int, help=argparse.SUPPRESS, dest=name)


def settle(values: Mapping[str, Any]) -> dict[str, Any]:
    """Warn about the settings above that were given; returns the values without them.

    Raises:
        NotSupported: a fixed setting has another value.
    """
    kept = {}
    for name, value in values.items():
        if reason := (SWITCHES | VALUES).get(name):
            logger.warning("%s has no effect: %s", _flag(name), reason)
        elif name in FIXED:
            _, only, feature = FIXED[name]
            if value != only:
                raise NotSupported(
                    f"{_flag(name)} {value}: {feature} does not exist yet; leave it {only}"
                )
        elif name in PARSERS:
            if value.lower().replace("-", "_") not in (PARSER, PARSER.replace("_", "")):
                logger.warning("%s %s: this model is parsed by %s", _flag(name), value, PARSER)
        else:
            kept[name] = value
    return kept


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
