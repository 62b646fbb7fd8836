"""Words and what they mean, as questions and answers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from leadline.eval.exercise import Chat, Message
from leadline.eval.tasks.family import Family, assistant, draw_thinking, user
from leadline.eval.tasks.words import capital

FILE = "glosses.json"
_QUESTIONS = (
    "What is {}?",
    "What is {}? Answer in one sentence.",
    "Can you tell me what {} is?",
    "Explain in one sentence what {} is.",
)


@dataclass(frozen=True, slots=True)
class Gloss:
    """What something is.

    Attributes:
        name: a noun, with an article where it is countable.
        meaning: a phrase that follows "is".
        is_core: one of those few that are repeated until they are known by heart.
    """

    name: str
    meaning: str
    is_core: bool


def read_glosses(folder: Path) -> list[Gloss]:
    """What ``write_glosses`` stored."""
    return [Gloss(**entry) for entry in json.loads((folder / FILE).read_text(encoding="utf-8"))]


def write_glosses(folder: Path, glosses: Sequence[Gloss]) -> None:
    """Store glosses in a data folder."""
    text = json.dumps([asdict(gloss) for gloss in glosses], indent=0, ensure_ascii=False)
    (folder / FILE).write_text(text, encoding="utf-8")


def gloss_family(glosses: Sequence[Gloss]) -> Family:
    """Chats that ask for meanings, one question a turn; half of them about core words."""
    core = [gloss for gloss in glosses if gloss.is_core]

    def make(rng: random.Random, size: int, *, thinking: bool | None = None) -> Chat:
        thinks = draw_thinking(rng, thinking)
        messages: list[Message] = []
        wanted = []
        for _ in range(max(1, size // 40)):
            gloss = rng.choice(core if rng.random() < 0.5 else glosses)
            reasoning = f"The question is about {gloss.name}." if thinks else None
            answer = f"{capital(gloss.name)} is {gloss.meaning}."
            messages.append(user(rng.choice(_QUESTIONS).format(gloss.name)))
            messages.append(assistant(answer, reasoning))
            wanted.append(gloss.meaning)
        return Chat("glosses", messages, wanted, thinking=thinks)

    return Family("glosses", make, (20, 200), "what words mean, from memory")
