"""What a family of exercises is, and the small pieces that all of them are made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from leadline.eval.exercise import Exercise, Message

Filler: TypeAlias = Callable[[random.Random, int], str]
"""Prose of about so many tokens, to hide facts in."""


@dataclass(frozen=True, slots=True)
class Family:
    """A generator of exercises of one kind.

    Attributes:
        name: what mixtures and reports call it; ``Exercise.family`` of all it makes.
        make: ``(rng, size)``, ``size`` the wanted length of the prompt in tokens. Where the
            exercise is a chat, ``thinking=`` settles whether answers are reasoned; left out, the
            generator draws it.
        sizes: lengths that make sense, shortest and longest.
        description: one line.
        has_filler: ``make`` takes ``filler=``.
    """

    name: str
    make: Callable[..., Exercise]
    sizes: tuple[int, int]
    description: str
    has_filler: bool = False


def system(content: str) -> Message:
    """A system message."""
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": content}


def assistant(
    content: str, reasoning: str | None = None, calls: Sequence[Mapping[str, Any]] = ()
) -> Message:
    """An assistant's message; ``reasoning`` None is an answer without thinking."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def num_tokens(text: str) -> int:
    """About how many tokens ``text`` has: digits stand alone, 3.3 bytes of the rest make one."""
    num_digits = sum(map(text.count, "0123456789"))
    return num_digits + int((len(text) - num_digits) / 3.3)


def draw_thinking(rng: random.Random, thinking: bool | None) -> bool:
    """The caller's choice, or thinking half of the time: servers think by default."""
    return rng.random() < 0.5 if thinking is None else thinking


def draw_effort(rng: random.Random, thinking: bool) -> int | None:
    """A reasoning effort: nearly always the default."""
    return rng.randint(1, 100) if thinking and rng.random() < 0.1 else None
