"""Kinds of facts: what they are about, and how notes and questions word them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from leadline.eval.tasks import words

Draw = Callable[[random.Random], str]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fact.

    Attributes:
        key: draws what the fact is about, for ``{k}``.
        value: draws ``{v}``.
        statements: how notes say it; the first one is how an answer says it.
        short: questions that the bare value answers.
        long: questions that a sentence answers.
    """

    key: Draw
    value: Draw
    statements: tuple[str, ...]
    short: tuple[str, ...]
    long: tuple[str, ...]


def _attribute(name: str, key: Draw, value: Draw, owner: str = "the {name} of {k}") -> Kind:
    """The kind ``the NAME of KEY is VALUE``."""
    of = owner.replace("{name}", name)
    return Kind(
        key,
        value,
        (f"{of} is {{v}}.", f"{of}: {{v}}.", f"for {{k}}, the {name} is {{v}}."),
        (f"what is {of}?", f"{of}?", f"give me only {of}."),
        (f"tell me {of}.", f"can you tell me {of}?", f"I forgot {of}. What was it?"),
    )


def _measure(how: str, key: Draw) -> Kind:
    """The kind ``KEY is 12 metres HOW``."""
    return Kind(
        key,
        lambda rng: f"{rng.randint(2, 99)} metres",
        (
            f"{{k}} is {{v}} {how}.",
            f"{{k}}: {{v}} {how}.",
            f"{{v}} {how} is {{k}}.",
        ),
        (f"how {how} is {{k}}?", f"give me only how {how} {{k}} is."),
        (f"tell me how {how} {{k}} is.", f"do you know how {how} {{k}} is?"),
    )


def _digits(*counts: int) -> Draw:
    return lambda rng: words.digits(rng, rng.choice(counts))


def _one_of(items: list[str]) -> Draw:
    return lambda rng: rng.choice(items)


def _the_thing(rng: random.Random) -> str:
    return f"the {words.thing(rng)}"


def _person(rng: random.Random) -> str:
    return rng.choice(words.FIRST_NAMES) if rng.random() < 0.6 else words.full_name(rng)


def _place(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return f"the {rng.choice(words.PLACES)}"
    return f"the {rng.choice((*words.ADJECTIVES, *words.COLOURS))} {rng.choice(words.PLACES)}"


def _email(rng: random.Random) -> str:
    return f"{words.coined(rng)}@{rng.choice(words.OBJECTS)}.com"


def _phone(rng: random.Random) -> str:
    return f"{words.digits(rng, 3)}-{words.digits(rng, 4)}"


def _date(rng: random.Random) -> str:
    return f"{rng.choice(words.MONTHS)} {rng.randint(1, 28)}"


def _time(rng: random.Random) -> str:
    return f"{rng.randint(1, 23)}:{rng.randrange(0, 60, 5):02d}"


def _word_value(rng: random.Random) -> str:
    return rng.choice(words.OBJECTS) if rng.random() < 0.5 else words.coined(rng)


def _hex(rng: random.Random) -> str:
    return words.hex_id(rng, rng.choice((4, 4, 6, 8)))


def _label(rng: random.Random) -> str:
    form = rng.randrange(3)
    if form == 0:
        return words.coined(rng)
    if form == 1:
        return f"{rng.choice(words.OBJECTS)}-{rng.randint(1, 99)}"
    return f"{rng.choice('ABCDEFGHJKLMNPRSTUVWXYZ')}{words.digits(rng, 2)}"


KINDS = (
    _attribute("code", _the_thing, _digits(3, 4, 4, 5)),
    _attribute("number", _the_thing, _digits(1, 2, 3)),
    _attribute("price", _the_thing, lambda rng: f"${rng.randint(2, 999)}"),
    _attribute("weight", _the_thing, lambda rng: f"{rng.randint(2, 99)} kg"),
    _attribute("serial", _the_thing, _hex),
    _attribute("colour", _the_thing, _one_of(words.COLOURS)),
    _attribute("code", _label, _digits(3, 4, 4), "the {name} for {k}"),
    _attribute("value", _label, _digits(1, 2, 3, 4)),
    _attribute("key", _label, _hex),
    _attribute("password", _person, _word_value),
    _attribute("phone number", _person, _phone),
    _attribute("lucky number", _person, _digits(1, 2)),
    _attribute("room", _person, _digits(2, 3)),
    _attribute("birthday", _person, _date),
    _attribute("favourite food", _person, _one_of(words.FOODS)),
    _attribute("favourite animal", _person, _one_of(words.ANIMALS)),
    Kind(
        _person,
        _one_of(words.CITIES),
        ("{k} lives in {v}.", "{k} has a home in {v}.", "the home of {k} is in {v}."),
        ("where does {k} live?", "in which city does {k} live?"),
        ("tell me where {k} lives.", "can you tell me where {k} lives?"),
    ),
    Kind(
        _person,
        _one_of(words.JOBS),
        ("the job of {k} is {v}.", "{k} works as {v}.", "the job of {k}: {v}."),
        ("what is the job of {k}?", "what does {k} do for a living?"),
        ("tell me what the job of {k} is.", "can you tell me the job of {k}?"),
    ),
    Kind(
        _the_thing,
        _person,
        ("{k} belongs to {v}.", "{v} owns {k}.", "the owner of {k} is {v}."),
        ("who owns {k}?", "who is the owner of {k}?"),
        ("tell me who owns {k}.", "can you tell me whose {k} is?"),
    ),
    Kind(
        _the_thing,
        lambda rng: f"the {rng.choice(words.PLACES)}",
        ("{k} is in {v}.", "you find {k} in {v}.", "somebody put {k} in {v}."),
        ("where is {k}?", "in which place is {k}?"),
        ("tell me where {k} is.", "can you tell me where to find {k}?"),
    ),
    Kind(
        _person,
        _time,
        ("{k} arrives at {v}.", "the train of {k} comes at {v}.", "at {v}, {k} arrives."),
        ("when does {k} arrive?", "at what time does {k} arrive?"),
        ("tell me when {k} arrives.", "can you tell me when {k} arrives?"),
    ),
    _attribute("version", _label, lambda rng: ".".join(str(rng.randint(0, 19)) for _ in "123")),
    _attribute("port", _label, _digits(4)),
    _attribute("address", _label, lambda rng: f"10.{rng.randint(0, 255)}.{rng.randint(0, 255)}.7"),
    _attribute("owner", _label, _person),
    _attribute("e-mail address", _person, _email),
    _attribute("seat", _person, lambda rng: f"{rng.randint(1, 40)}{rng.choice('ABCDEF')}"),
    _attribute("locker", _person, _digits(2, 3)),
    _attribute("boss", _person, _person),
    _attribute("capital", words.coined_place, words.coined_place),
    _attribute("population", words.coined_place, _digits(3, 4, 5)),
    _measure("deep", _place),
    _measure("long", _place),
    _measure("high", _place),
    _measure("wide", _place),
    Kind(
        _person,
        _digits(2),
        ("{k} is {v} years old.", "the age of {k} is {v}.", "{k} turned {v}."),
        ("how old is {k}?", "what is the age of {k}?"),
        ("tell me how old {k} is.", "can you tell me the age of {k}?"),
    ),
    Kind(
        _person,
        _one_of(words.LANGUAGES),
        ("{k} speaks {v}.", "the language of {k} is {v}.", "{k} only knows {v}."),
        ("which language does {k} speak?", "what does {k} speak?"),
        ("tell me which language {k} speaks.", "can you tell me what {k} speaks?"),
    ),
    Kind(
        _the_thing,
        lambda rng: str(rng.randint(1700, 2049)),
        ("{k} was made in {v}.", "{k} is from {v}.", "somebody built {k} in {v}."),
        ("when was {k} made?", "from which year is {k}?"),
        ("tell me when {k} was made.", "can you tell me how old {k} is?"),
    ),
    Kind(
        lambda rng: f"the meeting on {rng.choice(words.SUBJECTS)}",
        lambda rng: f"{rng.choice(words.WEEKDAYS)} at {_time(rng)}",
        ("{k} is on {v}.", "{k}: {v}.", "we hold {k} on {v}."),
        ("when is {k}?", "on which day is {k}?"),
        ("tell me when {k} is.", "can you tell me when we have {k}?"),
    ),
)
