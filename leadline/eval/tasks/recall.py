"""Recall: a value is asked for that stands somewhere in the context.

The dense form asks for nearly every token: how soon recall forms depends on the number of answers
in a text, not on the number of texts.
"""

from __future__ import annotations

import random

from leadline.eval.exercise import Chat, Message, Passage
from leadline.eval.tasks import words
from leadline.eval.tasks.facts import NOT_NOTED, Fact, Question, draw_notes, draw_stranger
from leadline.eval.tasks.family import (
    assistant,
    draw_effort,
    draw_thinking,
    num_tokens,
    system,
    user,
)
from leadline.eval.tasks.systems import draw_system

_DENSE_SEPARATORS = ("; ", ", ", "\n", " | ", ". ", " / ")
_DENSE_LINKS = (" ", ": ", "=", " = ", " -> ", " is ")
_DENSE_BREAKS = (" || ", "\n\n", "\n---\n", " # ", "\nAgain: ", "\n\nQuestions\n")


def recall_dense(rng: random.Random, size: int) -> Passage:
    """Pairs of key and value, then the same pairs in other orders until ``size`` is used up.

    One in four is nearer to a chat: a note, then questions with their answers, one a line.
    """
    if rng.random() < 0.25:
        return Passage("recall_dense", _questioned(rng, size))
    key, value = rng.choice(_DENSE_KEYS), rng.choice(_DENSE_VALUES)
    link, separator = rng.choice(_DENSE_LINKS), rng.choice(_DENSE_SEPARATORS)
    cost = num_tokens(f"{key(rng)}{link}{value(rng)}{separator}")
    rounds = rng.choice((2, 3, 3, 4))
    most = max(2, min(64, size // (cost * rounds)))
    keys: dict[str, str] = {}
    for _ in range(round(2 * (most / 2) ** rng.random())):  # as often 2 to 4 pairs as 32 to 64
        keys[key(rng)] = value(rng)
    pairs = [f"{k}{link}{v}" for k, v in keys.items()]
    parts = [separator.join(pairs)]
    for _ in range(max(rounds - 1, size // (cost * len(pairs)) - 1 if len(pairs) < most else 0)):
        rng.shuffle(pairs)
        parts.append(separator.join(pairs))
    return Passage("recall_dense", rng.choice(_DENSE_BREAKS).join(parts))


def _questioned(rng: random.Random, size: int) -> str:
    facts = draw_notes(rng, size // rng.choice((3, 4, 6)))
    parts = [join_facts(rng, facts), ""]
    rest = size - num_tokens(parts[0])
    while rest > 0:
        for fact in rng.sample(facts, len(facts)):
            question = fact.ask(rng)
            parts.append(f"{question.text} {question.answer}")
            rest -= num_tokens(parts[-1])
    return "\n".join(parts)


_DENSE_KEYS = (
    lambda rng: rng.choice(words.OBJECTS),
    lambda rng: rng.choice(words.OBJECTS),
    lambda rng: rng.choice(words.FIRST_NAMES),
    lambda rng: rng.choice(words.CITIES),
    lambda rng: rng.choice(words.ANIMALS),
    lambda rng: f"{rng.choice(words.COLOURS)} {rng.choice(words.OBJECTS)}",
    lambda rng: words.thing(rng),
    lambda rng: words.full_name(rng),
    lambda rng: words.coined(rng),
    lambda rng: words.digits(rng, 2),
    lambda rng: words.hex_id(rng, 4),
)
_DENSE_VALUES = (
    lambda rng: words.digits(rng, 1),
    lambda rng: words.digits(rng, 2),
    lambda rng: words.digits(rng, 3),
    lambda rng: words.digits(rng, 4),
    lambda rng: words.hex_id(rng, 4),
    lambda rng: rng.choice(words.ANIMALS),
    lambda rng: rng.choice(words.CITIES),
    lambda rng: rng.choice(words.FOODS),
    lambda rng: rng.choice(words.FIRST_NAMES),
    lambda rng: words.coined(rng),
)

_OPENINGS = (
    "Here is my note.",
    "Read this note.",
    "These are my notes:",
    "Keep this in mind.",
    "Please read:",
    "Here are some facts.",
    "Notes:",
)


def recall(
    rng: random.Random,
    size: int,
    *,
    thinking: bool | None = None,
    num_questions: int | None = None,
) -> Chat:
    """Notes, and questions about them.

    Args:
        rng: decides everything.
        size: tokens of the whole.
        thinking: whether the last answer is reasoned.
        num_questions: turns of the user; left out it is 1 to 16, as the size allows.
    """
    thinking = draw_thinking(rng, thinking)
    asks_unknown = num_questions is None and rng.random() < 0.08
    if num_questions is None:
        num_questions = max(1, min(rng.choice((1, 1, 2, 4, 6, 8, 12, 16)), size // 50))
    facts = draw_notes(rng, size - 24 * num_questions)
    asked = rng.sample(facts, min(num_questions, len(facts)))
    questions = [fact.ask(rng) for fact in asked]
    thoughts = [quote(fact) for fact in asked]
    if asks_unknown:
        stranger = draw_stranger(rng, facts)
        at = rng.randrange(len(asked))
        questions[at] = Question(stranger.ask(rng).text, NOT_NOTED, NOT_NOTED)
        thoughts[at] = f"The note does not say anything about {stranger.key}."
    messages = [system(draw_system(rng))] if rng.random() < 0.2 else []
    note = join_facts(rng, facts)
    if rng.random() < 0.15:
        messages = [system(f"Notes:\n{note}")]
        first = questions[0].text
    elif rng.random() < 0.3:
        first = f"{questions[0].text}\n\n{note}"
    else:
        first = f"{draw_opening(rng)}\n{note}\n\n{questions[0].text}"
    for i, question in enumerate(questions):
        reasoning = thoughts[i] if thinking and i == len(questions) - 1 else None
        messages += [
            user(question.text if i else first),
            assistant(question.answer, reasoning),
        ]
    return Chat(
        "recall",
        messages,
        wanted=[question.value for question in questions],
        cell=str(size),
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )


def recall_turns(rng: random.Random, size: int, *, thinking: bool | None = None) -> Chat:
    """Every question with a note of its own, which it mostly stands before.

    Those are the hard ones: by the time of the answer the question is as far away as the fact. One
    long note has room for one of them.
    """
    thinking = draw_thinking(rng, thinking)
    num_turns = max(1, min(rng.choice((1, 2, 4, 8, 16)), size // 80))
    messages: list[Message] = []
    wanted = []
    for i in range(num_turns):
        facts = draw_notes(rng, size // num_turns - 30)
        fact = rng.choice(facts)
        question, note = fact.ask(rng), join_facts(rng, facts)
        parts = [question.text, note] if rng.random() < 0.75 else [note, question.text]
        reasoning = quote(fact) if thinking and i == num_turns - 1 else None
        messages += [user("\n\n".join(parts)), assistant(question.answer, reasoning)]
        wanted.append(question.value)
    return Chat(
        "recall_turns",
        messages,
        wanted=wanted,
        cell=str(size),
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )


def recall_quiz(rng: random.Random, size: int, *, thinking: bool | None = None) -> Chat:
    """Notes and a list of questions, before them or behind, answered line by line."""
    thinking = draw_thinking(rng, thinking)
    num_questions = max(2, min(24, size // 50))
    facts = draw_notes(rng, size - 24 * num_questions)
    asked = rng.sample(facts, min(len(facts), num_questions))
    questions: list[Question] = [fact.ask(rng) for fact in asked]
    listed = "\n".join(f"{i}. {question.text}" for i, question in enumerate(questions, 1))
    answers = "\n".join(f"{i}. {question.answer}" for i, question in enumerate(questions, 1))
    reasoning = None
    if thinking:
        reasoning = "\n".join(f"{i}. {fact.text}" for i, fact in enumerate(asked, 1))
    parts = [
        f"{draw_opening(rng)}\n{join_facts(rng, facts)}",
        f"Answer these questions:\n{listed}",
    ]
    if rng.random() < 0.5:
        parts.reverse()
    return Chat(
        "recall_quiz",
        [user("\n\n".join(parts)), assistant(answers, reasoning)],
        wanted=[answers],
        cell=str(size),
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )


def draw_opening(rng: random.Random) -> str:
    """A line that introduces a note."""
    return rng.choice(_OPENINGS)


def join_facts(rng: random.Random, facts: list[Fact]) -> str:
    """The text of a note: running text, lines, or a list."""
    form = rng.random()
    if form < 0.45:
        return " ".join(fact.text for fact in facts)
    if form < 0.75:
        return "\n".join(fact.text for fact in facts)
    return "\n".join(f"- {fact.text}" for fact in facts)


def quote(fact: Fact) -> str:
    """The reasoning that leads to an answer: the note, in its own words."""
    return f"The note says: {fact.text}"
