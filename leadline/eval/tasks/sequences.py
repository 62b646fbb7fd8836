"""Small jobs on a list of words or numbers: copy, reverse, sort, count, pick, close brackets."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from leadline.eval.exercise import Chat, Message
from leadline.eval.tasks import prose, words
from leadline.eval.tasks.family import assistant, draw_effort, draw_thinking, num_tokens, user


@dataclass(frozen=True, slots=True)
class Job:
    """A request, its answer, and the thought between them."""

    request: str
    answer: str
    thought: str


_ITEMS: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: rng.choice(words.OBJECTS),
    lambda rng: rng.choice(words.ANIMALS),
    lambda rng: rng.choice(words.CITIES),
    lambda rng: rng.choice(words.FIRST_NAMES),
    lambda rng: words.coined(rng),
    lambda rng: str(rng.randint(0, 9)),
    lambda rng: str(rng.randint(10, 99)),
    lambda rng: rng.choice("abcdefghijklmnopqrstuvwxyz"),
)
_NUMBERS = _ITEMS[5:7]


def _draw(rng: random.Random, most: int) -> tuple[list[str], str]:
    """Different items, and how they are written."""
    item = rng.choice(_ITEMS)
    count = rng.randint(2, max(2, most))
    items = list(dict.fromkeys(item(rng) for _ in range(count)))
    return items, rng.choice((" ", ", ", ", ", "; ", " - ")).join(items)


def _numbered(items: list[str]) -> str:
    return ", ".join(f"{i} {item}" for i, item in enumerate(items, 1))


def _copy(rng: random.Random, most: int) -> Job:
    text = prose.sentence(rng) if rng.random() < 0.4 else _draw(rng, 2 * most)[1]
    verb = rng.choice(("Copy this", "Repeat", "Say", "Write exactly this", "Repeat after me"))
    return Job(f"{verb}: {text}", text, "I copy the text.")


def _reverse(rng: random.Random, most: int) -> Job:
    items, text = _draw(rng, most)
    verb = rng.choice(("Reverse this list", "Write this backwards", "Reverse", "Turn this around"))
    return Job(f"{verb}: {text}", ", ".join(reversed(items)), _numbered(items))


def _sort(rng: random.Random, most: int) -> Job:
    items, text = _draw(rng, min(8, most))
    if items[0].isdigit():
        ordered = sorted(items, key=int)
        down = rng.random() < 0.4
        verb = "Sort from large to small" if down else rng.choice(("Sort", "Sort these numbers"))
        ordered = ordered[::-1] if down else ordered
    else:
        ordered = sorted(items, key=str.lower)
        verb = rng.choice(("Sort", "Sort these words", "Put in alphabetical order"))
    return Job(f"{verb}: {text}", ", ".join(ordered), f"First comes {ordered[0]}.")


def _count(rng: random.Random, most: int) -> Job:
    items, text = _draw(rng, min(12, most))
    verb = rng.choice(("How many items are in this list", "Count these", "How many are there"))
    return Job(f"{verb}: {text}", str(len(items)), _numbered(items))


def _pick(rng: random.Random, most: int) -> Job:
    items, text = _draw(rng, min(10, most))
    place = rng.randrange(len(items))
    name = _ORDINALS[place]
    if place == len(items) - 1 and rng.random() < 0.7:
        name = "last"
    verb = rng.choice(("What is the {} item", "Give me the {} item", "Which one is {}"))
    return Job(f"{verb.format(name)}: {text}", items[place], _numbered(items[: place + 1]))


_ORDINALS = words.of("first second third fourth fifth sixth seventh eighth ninth tenth")


def _after(rng: random.Random, most: int) -> Job:
    items, text = _draw(rng, most)
    place = rng.randrange(len(items) - 1) if len(items) > 1 else 0
    if len(items) == 1:
        return _copy(rng, most)
    pair = f"{items[place]}, {items[place + 1]}"
    if rng.random() < 0.5:
        return Job(f"What comes after {items[place]}: {text}", items[place + 1], pair)
    return Job(f"What comes before {items[place + 1]}: {text}", items[place], pair)


def _case(rng: random.Random, most: int) -> Job:
    _, text = _draw(rng, most)
    if rng.random() < 0.5:
        return Job(f"Write in upper case: {text}", text.upper(), "I use capital letters.")
    return Job(f"Write in lower case: {text.upper()}", text.lower(), "I use small letters.")


def _brackets(rng: random.Random, most: int) -> Job:
    stack: list[str] = []
    text = ""
    for _ in range(rng.randint(2, 3 * most)):
        if stack and rng.random() < 0.4:
            text += stack.pop()
        else:
            opening, closing = rng.choice(("()", "[]", "{}"))
            text += opening
            stack.append(closing)
    if not stack:
        text, stack = f"{text}(", [")"]
    verb = rng.choice(("Close the brackets", "Which brackets are missing", "Complete"))
    return Job(f"{verb}: {text}", "".join(reversed(stack)), f"{len(stack)} are open.")


def _largest(rng: random.Random, most: int) -> Job:
    item = rng.choice(_NUMBERS)
    numbers = list(dict.fromkeys(item(rng) for _ in range(rng.randint(2, min(8, most + 1)))))
    text = ", ".join(numbers)
    if rng.random() < 0.5:
        largest = max(numbers, key=int)
        return Job(f"What is the largest number: {text}", largest, f"The largest is {largest}.")
    smallest = min(numbers, key=int)
    return Job(f"What is the smallest number: {text}", smallest, f"The smallest is {smallest}.")


def _spell(rng: random.Random, most: int) -> Job:
    word = rng.choice((rng.choice(words.OBJECTS), words.coined(rng)))
    return Job(f"Spell {word}.", "-".join(word), f"The word is {word}.")


_SIGNS = ((", ", "commas"), ("-", "dashes"), (" ", "spaces"), ("; ", "semicolons"))


def _join(rng: random.Random, most: int) -> Job:
    items, _ = _draw(rng, most)
    sign, name = rng.choice(
        ((", ", "commas"), ("-", "dashes"), (" ", "spaces"), ("; ", "semicolons"))
    )
    lines = "\n".join(items)
    return Job(f"Join these lines with {name}:\n{lines}", sign.join(items), f"I use {name}.")


def _number_lines(rng: random.Random, most: int) -> Job:
    items, text = _draw(rng, most)
    listed = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    verb = rng.choice(("Make a numbered list", "Number these", "Write this as a numbered list"))
    return Job(f"{verb}: {text}", listed, f"The list has {len(items)} items.")


_JOBS = (
    _copy,
    _copy,
    _reverse,
    _sort,
    _count,
    _pick,
    _after,
    _case,
    _brackets,
    _largest,
    _spell,
    _join,
    _number_lines,
)


def sequences(rng: random.Random, size: int, *, thinking: bool | None = None) -> Chat:
    """One job a turn until ``size`` is used up; short sizes have short lists."""
    thinking = draw_thinking(rng, thinking)
    most = max(4, min(24, size // 20))
    jobs: list[Job] = []
    while size > 0 and len(jobs) < 8:
        job = rng.choice(_JOBS)(rng, most)
        jobs.append(job)
        size -= num_tokens(job.request + job.answer) + 6
        if rng.random() < 0.1:
            break
    messages: list[Message] = []
    for i, job in enumerate(jobs):
        thought = job.thought if thinking and i == len(jobs) - 1 else None
        messages += [user(job.request), assistant(job.answer, thought)]
    return Chat(
        "sequences",
        messages,
        wanted=[job.answer for job in jobs],
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )
