"""Prose that no training has seen."""

from __future__ import annotations

import json
import random
from functools import cache
from importlib.resources import files

from leadline.core.errors import ConfigError
from leadline.eval.exercise import Passage

FILE = "data/heldout.jsonl"


@cache
def texts() -> tuple[str, ...]:
    """All of it, longest documents in pieces of about a thousand tokens.

    Raises:
        ConfigError: the package was built without it.
    """
    file = files("leadline.eval") / FILE
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(
            f"leadline/eval/{FILE} is missing, so there is no prose to measure; install the whole "
            "package, or leave prose out of --families"
        ) from None
    return tuple(json.loads(line)["text"] for line in lines)


def passage(rng: random.Random) -> Passage:
    """One of them."""
    return Passage("prose", rng.choice(texts()))
