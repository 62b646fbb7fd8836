"""Flags that vLLM's users have in their scripts and that have nothing to switch here.

They are accepted with one warning each; values that ask for something that does not exist are
refused by name (serving-api 15.1).
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

from leadline.core.errors import NotSupported

logger = logging.getLogger(__name__)

PARSER = "deepseek_v41"

# flag -> why it has no effect
SWITCHES = {
    "--trust-remote-code": "no code is ever loaded from a checkpoint",
    "--enable-chunked-prefill": "prefill is always chunked",
    "--async-scheduling": "the engine schedules by itself",
    "--enforce-eager": "there are no graphs to turn off",
    "--disable-log-requests": "prompts are never logged",
    "--enable-auto-tool-choice": "it is always on",
    "--enable-prompt-tokens-details": "they are always sent",
    "--language-model-only": "images are not served",
}
VALUES = {
    "--compilation-config": "nothing is compiled",
    "--attention-backend": "there is one",
    "--moe-backend": "there is one",
    "--swap-space": "pages are not swapped out",
    "--tokenizer-mode": "the checkpoint's tokenizer.json is used",
}
# flag -> (short form, the only value, what another value would need)
FIXED = {
    "--tensor-parallel-size": ("-tp", 1, "tensor parallelism"),
    "--pipeline-parallel-size": ("-pp", 1, "pipeline parallelism"),
    "--data-parallel-size": ("-dp", 1, "data parallelism"),
    "--block-size": (None, 256, "another page size"),
}
PARSERS = ("--reasoning-parser", "--tool-call-parser")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Accept the flags, without showing them in ``--help``."""
    for flag in SWITCHES:
        parser.add_argument(
            flag, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS, dest=flag
        )
    for flag in (*VALUES, *PARSERS):
        parser.add_argument(flag, help=argparse.SUPPRESS, dest=flag)
    for flag, (short, _, _) in FIXED.items():
        names = [flag] if short is None else [short, flag]
        parser.add_argument(*names, type=int, help=argparse.SUPPRESS, dest=flag)


def settle(values: dict[str, Any]) -> dict[str, Any]:
    """Warn about the flags above that were given; returns the values without them.

    Raises:
        NotSupported: a fixed setting has another value.
    """
    kept = {}
    for name, value in values.items():
        if reason := (SWITCHES | VALUES).get(name):
            logger.warning("%s has no effect: %s", name, reason)
        elif name in FIXED:
            _, only, feature = FIXED[name]
            if value != only:
                raise NotSupported(f"{name} {value}: {feature} does not exist yet; leave it {only}")
        elif name in PARSERS:
            if value.lower().replace("-", "_") not in (PARSER, PARSER.replace("_", "")):
                logger.warning("%s %s: this model is parsed by %s", name, value, PARSER)
        else:
            kept[name] = value
    return kept
