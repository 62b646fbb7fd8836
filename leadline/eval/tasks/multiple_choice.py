"""Four options, one of them right by the notes: the answer is a letter, cheap to score exactly."""

from __future__ import annotations

import random

from leadline.eval.exercise import Chat, Message
from leadline.eval.tasks.facts import Fact, draw_notes
from leadline.eval.tasks.family import assistant, draw_effort, draw_thinking, user
from leadline.eval.tasks.recall import draw_opening, join_facts

_LETTERS = "ABCD"
_STYLES = ("{}) {}", "{}. {}", "({}) {}", "{}: {}")
_ENDINGS = ("Answer with the letter.", "Which option is right?", "Choose A, B, C or D.", "")


def multiple_choice(
    rng: random.Random,
    size: int,
    *,
    thinking: bool | None = None,
    num_questions: int | None = None,
) -> Chat:
    """Notes and questions with four options each.

    Args:
        rng: decides everything.
        size: tokens of the whole.
        thinking: whether the last answer is reasoned.
        num_questions: turns of the user; left out it is 1 to 8, as the size allows.
    """
    thinking = draw_thinking(rng, thinking)
    if num_questions is None:
        num_questions = rng.randint(1, max(1, min(8, size // 80)))
    facts = draw_notes(rng, max(40, size - 50 * num_questions))
    asked = rng.sample(facts, min(num_questions, len(facts)))
    style, ending = rng.choice(_STYLES), rng.choice(_ENDINGS)
    messages: list[Message] = []
    wanted = []
    for i, fact in enumerate(asked):
        options = _options(rng, fact, facts)
        letter = _LETTERS[options.index(fact.value)]
        lines = [style.format(*pair) for pair in zip(_LETTERS, options, strict=True)]
        text = "\n".join([fact.ask_for_value(rng), *lines, ending]).strip()
        if not i:
            text = f"{draw_opening(rng)}\n{join_facts(rng, facts)}\n\n{text}"
        thought = f"The note says: {fact.text} That is {letter}." if thinking else None
        messages += [user(text), assistant(letter, thought if i == len(asked) - 1 else None)]
        wanted.append(letter)
    return Chat(
        "multiple_choice",
        messages,
        wanted=wanted,
        cell=str(size),
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )


def _options(rng: random.Random, fact: Fact, facts: list[Fact]) -> list[str]:
    """The value among three others of its kind, from the notes where they hold such."""
    others = list(
        dict.fromkeys(o.value for o in facts if o.kind is fact.kind and o.value != fact.value)
    )
    options = [fact.value, *rng.sample(others, min(3, len(others)))]
    while len(options) < 4:
        value = fact.kind.value(rng)
        if value not in options:
            options.append(value)
    rng.shuffle(options)
    return options
