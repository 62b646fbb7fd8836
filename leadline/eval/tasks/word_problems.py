"""Small sums in words, with every step written out, and plain sums.

With thinking the steps are the reasoning and the number is the answer; without, the answer holds
the steps and ends in ``The answer is 42.`` unless the user wants the number only.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from leadline.eval.exercise import Chat, Passage
from leadline.eval.tasks import words
from leadline.eval.tasks.family import assistant, draw_effort, draw_thinking, system, user


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, the steps that solve it, and the number."""

    question: str
    steps: str
    answer: int


def _names(rng: random.Random, count: int) -> list[str]:
    return rng.sample(words.FIRST_NAMES, count)


def _plural(rng: random.Random) -> str:
    return rng.choice(_PLURALS)


_PLURALS = words.of(
    "apples pears plums lemons bananas figs dates nuts carrots onions beans cards coins stamps "
    "books pens pencils bottles cups plates spoons balls dolls keys maps rings hats buttons shells "
    "stones flowers eggs cookies stickers marbles tickets candles bells beads badges toys"
)


def _gain_loss(rng: random.Random) -> Problem:
    (name, other), items = _names(rng, 2), _plural(rng)
    total = rng.randint(2, 50)
    question, steps = f"{name} has {total} {items}.", []
    for _ in range(rng.randint(1, 3)):
        if total > 3 and rng.random() < 0.5:
            change = rng.randint(1, total - 1)
            verb = rng.choice((f"gives {{}} to {other}", "loses {}", "sells {}", "throws away {}"))
            steps.append(f"{total} - {change} = {total - change}.")
            total -= change
        else:
            change = rng.randint(1, 40)
            verb = rng.choice(("buys {} more", f"gets {{}} from {other}", "finds {}"))
            steps.append(f"{total} + {change} = {total + change}.")
            total += change
        link = rng.choice((f"{name} ", f"Then {name} ", f"Later {name} "))
        question += f" {link}{verb.format(change)}."
    question += f" How many {items} does {name} have now?"
    return Problem(question, " ".join(steps), total)


def _price(rng: random.Random) -> Problem:
    name, items = _names(rng, 1)[0], _plural(rng)
    count, price = rng.randint(2, 9), rng.randint(2, 9)
    total = count * price
    question = f"{name} buys {count} {items} for {price} dollars each."
    steps = f"{count} * {price} = {total}."
    if rng.random() < 0.5:
        paid = total + rng.randint(1, 30)
        question += f" {name} pays with {paid} dollars. How many dollars does {name} get back?"
        return Problem(question, f"{steps} {paid} - {total} = {paid - total}.", paid - total)
    return Problem(f"{question} How many dollars does {name} pay?", steps, total)


def _two_prices(rng: random.Random) -> Problem:
    name = _names(rng, 1)[0]
    first, second = rng.sample(_PLURALS, 2)
    n, p, m, q = (rng.randint(2, 9) for _ in range(4))
    question = (
        f"{first.capitalize()} cost {p} dollars each and {second} cost {q} dollars each. "
        f"{name} buys {n} {first} and {m} {second}. How many dollars is that?"
    )
    steps = f"{n} * {p} = {n * p}. {m} * {q} = {m * q}. {n * p} + {m * q} = {n * p + m * q}."
    return Problem(question, steps, n * p + m * q)


def _compare(rng: random.Random) -> Problem:
    (name, other), items = _names(rng, 2), _plural(rng)
    base, gap = rng.randint(3, 40), rng.randint(1, 20)
    if base > gap and rng.random() < 0.5:
        less = base - gap
        question = f"{name} has {base} {items}. {other} has {gap} fewer than {name}."
        steps = f"{base} - {gap} = {less}."
        count = less
    else:
        count = base + gap
        question = f"{name} has {base} {items}. {other} has {gap} more than {name}."
        steps = f"{base} + {gap} = {count}."
    if rng.random() < 0.5:
        return Problem(f"{question} How many {items} does {other} have?", steps, count)
    total = base + count
    question += f" How many {items} do they have together?"
    return Problem(question, f"{steps} {base} + {count} = {total}.", total)


def _groups(rng: random.Random) -> Problem:
    items, box = _plural(rng), rng.choice(("box", "bag", "basket", "jar", "drawer", "shelf"))
    boxes = {"box": "boxes", "shelf": "shelves"}.get(box, f"{box}s")
    count, each, rest = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 20)
    total = count * each
    question = f"There are {count} {boxes} with {each} {items} in each {box}"
    if rng.random() < 0.5:
        question += f", and {rest} more {items} on the table. How many {items} are there?"
        return Problem(
            question,
            f"{count} * {each} = {total}. {total} + {rest} = {total + rest}.",
            total + rest,
        )
    return Problem(
        f"{question}. How many {items} are there?", f"{count} * {each} = {total}.", total
    )


def _share(rng: random.Random) -> Problem:
    name, items = _names(rng, 1)[0], _plural(rng)
    friends, each = rng.randint(2, 9), rng.randint(2, 9)
    total = friends * each
    question = (
        f"{name} has {total} {items} and shares them among {friends} friends. "
        f"How many {items} does each friend get?"
    )
    return Problem(question, f"{total} / {friends} = {each}.", each)


def _time(rng: random.Random) -> Problem:
    name, start, length = _names(rng, 1)[0], rng.randint(1, 12), rng.randint(1, 10)
    act = rng.choice(("works", "reads", "sleeps", "walks", "travels", "cooks"))
    end = start + length
    if rng.random() < 0.5:
        question = f"{name} {act} from {start} o'clock to {end} o'clock. How many hours is that?"
        return Problem(question, f"{end} - {start} = {length}.", length)
    question = (
        f"{name} begins at {start} o'clock and {act} for {length} hours. When does {name} end?"
    )
    return Problem(question, f"{start} + {length} = {end}.", end)


def _times_as_many(rng: random.Random) -> Problem:
    (name, other), items = _names(rng, 2), _plural(rng)
    base, factor = rng.randint(2, 12), rng.randint(2, 5)
    many = base * factor
    question = f"{name} has {base} {items}. {other} has {factor} times as many."
    steps = f"{base} * {factor} = {many}."
    if rng.random() < 0.5:
        return Problem(f"{question} How many {items} does {other} have?", steps, many)
    question += f" How many {items} do {name} and {other} have together?"
    return Problem(question, f"{steps} {base} + {many} = {base + many}.", base + many)


def _weekly(rng: random.Random) -> Problem:
    name, days, each = _names(rng, 1)[0], rng.randint(2, 7), rng.randint(2, 9)
    what, unit = rng.choice(
        (("walks", "miles"), ("reads", "pages"), ("earns", "dollars"), ("saves", "dollars"))
    )
    total = days * each
    question = f"{name} {what} {each} {unit} a day. How many {unit} is that in {days} days?"
    return Problem(question, f"{days} * {each} = {total}.", total)


def _remaining(rng: random.Random) -> Problem:
    place, unit = rng.choice(
        (("bus", "people"), ("train", "people"), ("shop", "people"), ("lake", "ducks"))
    )
    start, gone, come = rng.randint(5, 60), rng.randint(1, 5), rng.randint(1, 20)
    left = start - gone
    question = (
        f"There are {start} {unit} at the {place}. {gone} leave and {come} come. "
        f"How many {unit} are there now?"
    )
    steps = f"{start} - {gone} = {left}. {left} + {come} = {left + come}."
    return Problem(question, steps, left + come)


_TEMPLATES = (
    _gain_loss,
    _gain_loss,
    _price,
    _two_prices,
    _compare,
    _groups,
    _share,
    _time,
    _times_as_many,
    _weekly,
    _remaining,
)


def _sum(rng: random.Random) -> tuple[str, int]:
    operation = rng.choice("++--*/")
    if operation == "*":
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        return f"{a} * {b}", a * b
    if operation == "/":
        a, b = rng.randint(2, 10), rng.randint(2, 10)
        return f"{a * b} / {b}", a
    most = rng.choice((9, 20, 99, 99))
    a, b = rng.randint(1, most), rng.randint(1, most)
    if operation == "+":
        return f"{a} + {b}", a + b
    a, b = max(a, b), min(a, b)
    return f"{a} - {b}", a - b


def word_problem(rng: random.Random, size: int, *, thinking: bool | None = None) -> Chat:
    """One problem after another, as many as ``size`` has room for: at most 4."""
    thinking = draw_thinking(rng, thinking)
    count = 1 if thinking else max(1, min(4, size // 90))
    number_only = rng.random() < 0.2 and not thinking
    messages = [system("Answer with the number only.")] if number_only else []
    wanted = []
    for _ in range(count):
        problem = rng.choice(_TEMPLATES)(rng)
        if thinking:
            reply = assistant(str(problem.answer), problem.steps)
        elif number_only:
            reply = assistant(str(problem.answer))
        else:
            reply = assistant(f"{problem.steps} The answer is {problem.answer}.")
        messages += [user(problem.question), reply]
        wanted.append(str(problem.answer))
    return Chat(
        "word_problem",
        messages,
        wanted=wanted,
        cell="",
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )


_SUM_QUESTIONS = ("What is {}?", "{} = ?", "Calculate {}.", "How much is {}?", "{}", "Compute {}.")


def arithmetic(rng: random.Random, size: int, *, thinking: bool | None = None) -> Chat:
    """Plain sums, about one for 25 tokens of ``size``: at most 10; the answer is the number."""
    thinking = draw_thinking(rng, thinking)
    sums = [_sum(rng) for _ in range(max(1, min(10, size // 25)))]
    messages = []
    for i, (text, result) in enumerate(sums):
        reasoning = f"{text} = {result}" if thinking and i == len(sums) - 1 else None
        question = rng.choice(_SUM_QUESTIONS).format(text)
        messages += [user(question), assistant(str(result), reasoning)]
    return Chat(
        "arithmetic",
        messages,
        wanted=[str(result) for _, result in sums],
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )


def arithmetic_drill(rng: random.Random, size: int) -> Passage:
    """Sums with their results, one a line or in a row."""
    separator = rng.choice(("\n", "; ", ", "))
    sums = [" = ".join(map(str, _sum(rng))) for _ in range(max(2, size // 9))]
    return Passage("arithmetic_drill", separator.join(sums))
