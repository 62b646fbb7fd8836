"""Facts in the midst of prose: one of them is asked for, or two have to be joined."""

from __future__ import annotations

import random
import re

from leadline.eval.exercise import Chat, Message
from leadline.eval.tasks import prose, words
from leadline.eval.tasks.facts import Fact, draw_fact
from leadline.eval.tasks.family import (
    Filler,
    assistant,
    draw_effort,
    draw_thinking,
    num_tokens,
    user,
)
from leadline.eval.tasks.recall import quote

_OPENINGS = ("Read this text.", "Here is a text.", "A long text follows.", "Text:")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def hide(text: str, facts: list[str], depths: list[float]) -> str:
    """Put facts between sentences of ``text``; depth 0 is before the first, 1 behind the last."""
    ends = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    pieces, start = [], 0
    for depth, fact in sorted(zip(depths, facts, strict=True)):
        end = min(ends, key=lambda place: abs(place - depth * len(text)))
        pieces += [text[start:end], fact if end < len(text) else f" {fact}", " "]
        start = end
    pieces.append(text[start:])
    return "".join(pieces).strip()


def needle(
    rng: random.Random,
    size: int,
    *,
    thinking: bool | None = None,
    filler: Filler = prose.filler,
    depth: float | None = None,
    num_questions: int | None = None,
) -> Chat:
    """Facts in prose, and questions about them.

    Args:
        rng: decides everything.
        size: tokens of the prompt.
        thinking: whether the last answer is reasoned.
        filler: makes the prose.
        depth: where the first fact asked for stands, 0 to 1; the cell then names it.
        num_questions: turns of the user; left out it is 1 to 4.
    """
    thinking = draw_thinking(rng, thinking)
    num_facts = num_questions or rng.choice((1, 1, 2, 3, 4))
    facts: dict[str, Fact] = {}
    while len(facts) < num_facts:
        fact = draw_fact(rng)
        facts[fact.key] = fact
    needles = list(facts.values())
    depths = [rng.random() for _ in needles]
    if depth is not None:
        depths[0] = depth
    used = 30 + sum(num_tokens(fact.text) for fact in needles)
    text = hide(filler(rng, max(30, size - used)), [fact.text for fact in needles], depths)
    questions = [fact.ask(rng) for fact in needles]
    messages: list[Message] = []
    for i, (fact, question) in enumerate(zip(needles, questions, strict=True)):
        reasoning = quote(fact) if thinking and i == len(needles) - 1 else None
        asked = question.text if i else ask_about(rng, text, question.text)
        messages += [user(asked), assistant(question.answer, reasoning)]
    return Chat(
        "needle",
        messages,
        wanted=[question.value for question in questions],
        cell=str(size) if depth is None else f"{depth:.0%} of {size}",
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )


def ask_about(rng: random.Random, text: str, question: str) -> str:
    """A user's message with a text and a question about it."""
    form = rng.random()
    if form < 0.2:
        return f"{question}\n\n{text}"
    if form < 0.4:
        return f"{text}\n\n{question}"
    return f"{rng.choice(_OPENINGS)}\n\n{text}\n\n{question}"


def two_hop(
    rng: random.Random,
    size: int,
    *,
    thinking: bool | None = None,
    filler: Filler = prose.filler,
    num_questions: int | None = None,
) -> Chat:
    """Who keeps what in which thing, and where each thing is; where is what somebody keeps?

    Args:
        rng: decides everything.
        size: tokens of the prompt.
        thinking: whether the last answer is reasoned.
        filler: makes the prose between the facts.
        num_questions: turns of the user; left out it is 1 to 8.
    """
    thinking = draw_thinking(rng, thinking)
    num_people = max(2, min(rng.choice((2, 3, 4, 6, 8, 12)), size // 40))
    num_questions = min(num_questions or rng.choice((1, 2, 4, 8)), num_people)
    people = rng.sample(words.FIRST_NAMES, num_people)
    boxes: dict[str, str] = {}
    while len(boxes) < num_people:
        boxes[words.thing(rng)] = place(rng)
    item = rng.choice(words.OBJECTS)
    kept = words.with_article(item)
    first, second = rng.choice(_HOPS)
    owned = list(zip(people, boxes, strict=True))
    links = {person: first.format(p=person, i=item, a=kept, b=box) for person, box in owned}
    homes = {box: second.format(b=box, r=room) for box, room in boxes.items()}
    sentences = [*links.values(), *homes.values()]
    rng.shuffle(sentences)
    rest = size - 25 * num_questions - sum(map(num_tokens, sentences))
    if rest < 60:
        text = " ".join(sentences)
    else:
        text = hide(filler(rng, rest), sentences, [rng.random() for _ in sentences])
    asked = rng.sample(owned, num_questions)
    messages: list[Message] = []
    for i, (person, box) in enumerate(asked):
        question = rng.choice(_HOP_QUESTIONS).format(p=person, i=item)
        thought = f"{links[person]} {homes[box]}" if thinking and i == len(asked) - 1 else None
        messages += [
            user(question if i else ask_about(rng, text, question)),
            assistant(boxes[box], thought),
        ]
    return Chat(
        "two_hop",
        messages,
        wanted=[boxes[box] for _, box in asked],
        cell=str(size),
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )


def place(rng: random.Random) -> str:
    """Where something can be."""
    if rng.random() < 0.5:
        return f"room {rng.randint(1, 99)}"
    return f"the {rng.choice(words.PLACES)}"


_HOPS = (
    ("{p} keeps {a} in the {b}.", "The {b} is in {r}."),
    ("The {i} of {p} is in the {b}.", "You find the {b} in {r}."),
    ("{p} put the {i} into the {b}.", "The {b} stands in {r}."),
    ("{p} hid {a} in the {b}.", "Somebody moved the {b} to {r}."),
)
_HOP_QUESTIONS = (
    "Where is the {i} of {p}?",
    "In which place do I find the {i} of {p}?",
    "Where does {p} have the {i}?",
)
