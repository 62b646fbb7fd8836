"""Conversations that change their subject: several short chats, one behind the other."""

from __future__ import annotations

import random
from collections.abc import Callable

from leadline.eval.exercise import Chat, Message
from leadline.eval.tasks.family import draw_effort, draw_thinking
from leadline.eval.tasks.multiple_choice import multiple_choice
from leadline.eval.tasks.needle import two_hop
from leadline.eval.tasks.recall import recall, recall_quiz
from leadline.eval.tasks.sequences import sequences
from leadline.eval.tasks.smalltalk import smalltalk
from leadline.eval.tasks.texts import listing, quotation
from leadline.eval.tasks.word_problems import arithmetic, word_problem

_Make = Callable[..., Chat]
# Small talk once at most: what the user said of himself is then never said twice.
_PARTS: tuple[_Make, ...] = (
    arithmetic,
    listing,
    multiple_choice,
    quotation,
    recall,
    recall_quiz,
    sequences,
    smalltalk,
    two_hop,
    word_problem,
)


def mixed(rng: random.Random, size: int, *, thinking: bool | None = None) -> Chat:
    """Two to five chats of different families, ``size`` tokens together."""
    thinking = draw_thinking(rng, thinking)
    count = max(2, min(rng.randint(2, 5), size // 80))
    messages: list[Message] = []
    wanted: list[str | None] = []
    makes = rng.sample(_PARTS, count)
    for i, make in enumerate(makes):
        part = _without_system(rng, make, size // count, thinking=thinking and i == count - 1)
        messages += part.messages
        wanted += part.wanted
    return Chat(
        "mixed",
        messages,
        wanted=wanted,
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )


def _without_system(rng: random.Random, make: _Make, size: int, *, thinking: bool) -> Chat:
    """A chat that can follow another one: no system prompt asks for a form or holds the notes."""
    while True:
        chat = make(rng, size, thinking=thinking)
        if chat.messages[0]["role"] != "system":
            return chat
