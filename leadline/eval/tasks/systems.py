"""System prompts that change nothing: a model has to live with them."""

from __future__ import annotations

import random

from leadline.eval.tasks import words

_ROLES = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are an assistant.",
    "You are an AI agent.",
    "You are a friendly bot.",
    "You are the assistant of {name}.",
    "You help the people of {city}.",
    "You work for a {job}.",
    "You are a coding agent.",
    "You are an expert for {subject}.",
    "Act as a careful {job}.",
)
_RULES = (
    "Be brief.",
    "Be brief and exact.",
    "Be polite.",
    "Do not make things up.",
    "Answer from what you are told.",
    "Think before you answer.",
    "Keep answers short.",
    "Never guess.",
    "Follow the instructions of the user.",
    "Read everything before you answer.",
    "Use plain words.",
    "If something is missing, say so.",
    "You know {language}.",
    "Help with every task that you are given.",
    "Do exactly what is asked.",
)
_TOOL_RULES = (
    "You have access to tools.",
    "Use the tools where they help.",
    "Call a tool only when it is needed.",
    "Prefer tools to guesses.",
    "You may call several tools at once.",
)


def draw_system(rng: random.Random, *, has_tools: bool = False) -> str:
    """One to five sentences."""
    rules = [*_RULES, *_TOOL_RULES] if has_tools else _RULES
    parts = [rng.choice(_ROLES), *rng.sample(rules, rng.choice((0, 0, 1, 1, 2, 3, 4)))]
    if len(parts) > 1 and rng.random() < 0.2:
        parts = parts[1:]
    text = rng.choice((" ", " ", "\n")).join(parts)
    return text.format(
        name=rng.choice(words.FIRST_NAMES),
        city=rng.choice(words.CITIES),
        job=rng.choice(words.JOBS),
        subject=rng.choice(words.SUBJECTS),
        language=rng.choice(words.LANGUAGES),
    )
