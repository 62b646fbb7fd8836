"""Questions about the form of a text: which sentence, how it goes on, what all of it is about."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from leadline.eval.exercise import Chat, Message
from leadline.eval.tasks import prose
from leadline.eval.tasks.facts import Fact, draw_notes
from leadline.eval.tasks.family import Filler, assistant, draw_effort, draw_thinking, user
from leadline.eval.tasks.needle import ask_about
from leadline.eval.tasks.recall import draw_opening

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_SENTENCE = re.compile(r"[A-Z][^.!?\n]{20,200}[.!?](?=\s|$)")


@dataclass(frozen=True, slots=True)
class _Query:
    """A question about a note, its answer, and the thought that leads there."""

    text: str
    answer: str
    thought: str


def listing(rng: random.Random, size: int, *, thinking: bool | None = None) -> Chat:
    """A note, and questions about its lines: repeat one, list what stands there, count."""
    thinking = draw_thinking(rng, thinking)
    num_questions = rng.randint(1, max(1, min(6, size // 80)))
    facts = draw_notes(rng, max(30, min(600, size) - 60 * num_questions))
    queries = [rng.choice(_QUERIES)(rng, facts) for _ in range(num_questions)]
    note = rng.choice((" ", "\n")).join(fact.text for fact in facts)
    messages: list[Message] = []
    for i, query in enumerate(queries):
        text = query.text if i else f"{draw_opening(rng)}\n{note}\n\n{query.text}"
        thought = query.thought if thinking and i == num_questions - 1 else None
        messages += [user(text), assistant(query.answer, thought)]
    return Chat(
        "listing",
        messages,
        wanted=[query.answer.rstrip(".") for query in queries],
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )


def _repeat(rng: random.Random, facts: list[Fact]) -> _Query:
    place = rng.randrange(min(len(facts), len(_ORDINALS)))
    verb = rng.choice(("Repeat the {} sentence.", "What is the {} sentence?", "Quote the {} fact."))
    start = " ".join(facts[place].text.split()[:4])
    thought = f'The {_ORDINALS[place]} sentence begins with "{start}".'
    return _Query(verb.format(_ORDINALS[place]), facts[place].text, thought)


def _last(rng: random.Random, facts: list[Fact]) -> _Query:
    verb = rng.choice(("Repeat the last sentence.", "What is the last sentence?"))
    return _Query(verb, facts[-1].text, f"The note ends with: {facts[-1].text}")


def _next(rng: random.Random, facts: list[Fact]) -> _Query:
    place = rng.randrange(len(facts) - 1)
    verb = rng.choice(('What comes after "{}"?', 'Which sentence follows "{}"?'))
    answer = facts[place + 1].text
    return _Query(verb.format(facts[place].text), answer, f"Behind it stands: {answer}")


def _keys(rng: random.Random, facts: list[Fact]) -> _Query:
    shown = facts[:12]
    few = len(shown) < len(facts)
    verb = "What are the first 12 facts about?" if few else "What are the facts about?"
    if not few and rng.random() < 0.5:
        verb = "List what the note is about."
    thought = f"I list {len(shown)} things."
    return _Query(verb, "\n".join(f"- {fact.key}" for fact in shown), thought)


def _values(rng: random.Random, facts: list[Fact]) -> _Query:
    shown = facts[:12]
    few = len(shown) < len(facts)
    verb = "List the first 12 values." if few else "List all values."
    thought = f"I list {len(shown)} values."
    return _Query(verb, ", ".join(fact.value for fact in shown), thought)


def _number(rng: random.Random, facts: list[Fact]) -> _Query:
    if len(facts) > 12:
        return _repeat(rng, facts)
    verb = rng.choice(("How many sentences has the note?", "How many facts are there?"))
    thought = ", ".join(f"{i} {fact.key}" for i, fact in enumerate(facts, 1))
    return _Query(verb, str(len(facts)), thought)


_QUERIES = (_repeat, _last, _next, _keys, _values, _number)

_CONTINUATIONS = (
    'How does this sentence go on: "{}"?',
    'Finish this sentence of the text: "{}"',
    'Which words follow "{}"?',
)


def quotation(
    rng: random.Random,
    size: int,
    *,
    thinking: bool | None = None,
    filler: Filler = prose.filler,
) -> Chat:
    """Prose, and beginnings of its sentences to be gone on with in its words."""
    thinking = draw_thinking(rng, thinking)
    text = filler(rng, max(60, size - 120))
    starts: dict[str, str] = {}
    for match in _SENTENCE.finditer(text):
        parts = match.group().split(" ")
        cut = min(5, len(parts) // 2)
        start = " ".join(parts[:cut])
        if text.count(start) == 1:
            starts[start] = " ".join(parts[cut:])
    chosen = rng.sample([*starts], min(len(starts), rng.choice((1, 2, 3, 4))))
    if not chosen:
        return quotation(rng, size, thinking=thinking)  # a text without plain sentences
    messages: list[Message] = []
    for i, start in enumerate(chosen):
        question = rng.choice(_CONTINUATIONS).format(start)
        thought = f"{start} {starts[start]}" if thinking and i == len(chosen) - 1 else None
        messages += [
            user(question if i else ask_about(rng, text, question)),
            assistant(starts[start], thought),
        ]
    return Chat(
        "quotation",
        messages,
        wanted=[starts[start].rstrip(".!?") for start in chosen],
        cell=str(size),
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )
