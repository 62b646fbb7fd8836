"""What is asked of the engine: prompts as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from leadline.core.errors import ConfigError

# Below lie the markers of every tokenizer of the family.
_FIRST_WORD = 64


def random_prompts(count: int, length: int, vocab_size: int, seed: str) -> list[list[int]]:
    """``count`` prompts of ``length`` ids; another seed shares no prefix with them."""
    draw = np.random.default_rng(list(seed.encode()))
    first = min(_FIRST_WORD, vocab_size - 1)
    prompts: list[list[int]] = draw.integers(first, vocab_size, (count, length)).tolist()
    return prompts


def file_prompts(
    file: Path, count: int, length: int, encode: Callable[[str], Sequence[int]]
) -> list[list[int]]:
    """``count`` prompts of at most ``length`` ids from a file.

    Lines of ``.jsonl`` are prompts; another text is encoded whole and cut. Both begin anew at their
    end.

    Args:
        file: with at least one token in it.
        count: how many.
        length: of each, at most.
        encode: text -> ids.

    Raises:
        ConfigError: it cannot be read, or holds no prompt.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset {file} cannot be read: {error}") from error
    if file.suffix == ".jsonl":
        lines = enumerate(text.splitlines(), 1)
        texts = [_prompt_of(file, number, line) for number, line in lines if line.strip()]
        pieces = [list(encode(text))[:length] for text in texts]
    else:
        ids = list(encode(text))
        pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
    pieces = [piece for piece in pieces if piece]
    if not pieces:
        raise ConfigError(f"dataset {file} holds no prompt")
    return [pieces[i % len(pieces)] for i in range(count)]


def _prompt_of(file: Path, number: int, line: str) -> str:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"dataset {file}, line {number} is no JSON: {error}") from error
    for name in ("prompt", "text"):
        if isinstance(found, dict) and isinstance(found.get(name), str):
            return str(found[name])
    raise ConfigError(f'dataset {file}, line {number} has no text "prompt" or "text"')
