"""Kinds of arguments and results of tools: their schema, a draw, and how people say a value."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from leadline.eval.tasks import words


def _say(value: Any) -> str:
    return str(value)


@dataclass(frozen=True, slots=True)
class Value:
    """A kind of value.

    Attributes:
        schema: JSON schema.
        draw: makes one.
        say: how a request words it; the value stands in it to be copied.
        description: for schemas that explain themselves.
    """

    schema: Mapping[str, Any]
    draw: Callable[[random.Random], Any]
    say: Callable[[Any], str] = field(default=_say)
    description: str = ""


def text(draw: Callable[[random.Random], str], description: str = "") -> Value:
    """A string."""
    return Value({"type": "string"}, draw, description=description)


def quoted(draw: Callable[[random.Random], str], description: str = "") -> Value:
    """A string that requests put in quotation marks."""
    return Value({"type": "string"}, draw, lambda value: f'"{value}"', description)


def one_of(*options: str) -> Value:
    """A string of an enum."""
    return Value({"type": "string", "enum": list(options)}, lambda rng: rng.choice(options))


def integer(low: int, high: int, description: str = "") -> Value:
    """A whole number, ends included."""
    return Value({"type": "integer"}, lambda rng: rng.randint(low, high), description=description)


def decimal(low: int, high: int) -> Value:
    """A number with one place."""
    return Value({"type": "number"}, lambda rng: rng.randint(10 * low, 10 * high) / 10)


def switch() -> Value:
    """True: a request names it, or else leaves the argument out."""
    return Value({"type": "boolean"}, lambda rng: True, lambda value: "")


def listing(item: Value, low: int, high: int) -> Value:
    """An array of different strings or numbers."""
    return Value(
        {"type": "array", "items": dict(item.schema)},
        lambda rng: list(dict.fromkeys(item.draw(rng) for _ in range(rng.randint(low, high)))),
        lambda value: words.listed([item.say(one) for one in value]),
    )


def record(template: str, **parts: Value) -> Value:
    """An object, said by a template of its parts."""
    return Value(
        {
            "type": "object",
            "properties": {name: dict(part.schema) for name, part in parts.items()},
            "required": list(parts),
        },
        lambda rng: {name: part.draw(rng) for name, part in parts.items()},
        lambda value: template.format(**{k: parts[k].say(v) for k, v in value.items()}),
    )


def _email(rng: random.Random) -> str:
    name = rng.choice(words.FIRST_NAMES).lower()
    return f"{name}@{rng.choice(words.OBJECTS)}.{rng.choice(('com', 'org', 'net'))}"


def _path(rng: random.Random) -> str:
    end = rng.choice(("txt", "py", "md", "json", "csv", "log", "toml", "html"))
    folders = [rng.choice(_FOLDERS) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    name = rng.choice(words.OBJECTS) if rng.random() < 0.6 else rng.choice(_FILES)
    return f"{rng.choice(('', '', '/'))}{'/'.join([*folders, name])}.{end}"


_FOLDERS = ("src", "docs", "data", "tests", "home", "tmp", "logs", "etc", "app", "config", "lib")
_FILES = ("notes", "main", "readme", "config", "report", "test", "utils", "index", "todo", "setup")


def _command(rng: random.Random) -> str:
    folder, name = rng.choice(_FOLDERS), rng.choice(words.OBJECTS)
    return rng.choice(_COMMANDS).format(folder=folder, name=name, n=rng.randint(1, 20))


_COMMANDS = (
    "ls -la",
    "ls {folder}",
    "cat {name}.txt",
    "grep -r {name} {folder}",
    "pwd",
    "wc -l {name}.py",
    "git status",
    "git log -{n}",
    "python {name}.py",
    "mkdir {name}",
    "rm {folder}/{name}.log",
    "head -n {n} {name}.csv",
    "pytest {folder}",
    "make {name}",
    "df -h",
    "cp {name}.txt {folder}",
)


def _url(rng: random.Random) -> str:
    end = rng.choice(("", f"/{rng.choice(words.PLACES)}", f"/{rng.choice(_FILES)}"))
    return f"https://{rng.choice(words.OBJECTS)}.{rng.choice(('com', 'org', 'net'))}{end}"


def _output(rng: random.Random) -> str:
    line = rng.choice((_phrase, _path, _email, lambda rng: words.digits(rng, 3)))
    return "\n".join(line(rng) for _ in range(rng.choice((1, 1, 2, 3, 4))))


def _date(rng: random.Random) -> str:
    year, month, day = rng.randint(1950, 2049), rng.randint(1, 12), rng.randint(1, 28)
    return f"{year}-{month:02d}-{day:02d}"


def _phrase(rng: random.Random) -> str:
    form = rng.randrange(6)
    thing, person = words.thing(rng), rng.choice(words.FIRST_NAMES)
    return (
        f"buy {rng.choice(words.FOODS)}",
        f"the {thing} is ready",
        f"call {person}",
        f"see you on {rng.choice(words.WEEKDAYS)}",
        f"{rng.choice(words.VERBS)} the {thing}",
        f"{person} is in the {rng.choice(words.PLACES)}",
    )[form]


def _topic(rng: random.Random) -> str:
    form = rng.randrange(4)
    return (
        rng.choice(words.SUBJECTS),
        f"{rng.choice(words.FOODS)} recipes",
        f"{rng.choice(words.SUBJECTS)} in {rng.choice(words.COUNTRIES)}",
        words.thing(rng),
    )[form]


CITY = text(lambda rng: rng.choice(words.CITIES), "Name of a city")
COUNTRY = text(lambda rng: rng.choice(words.COUNTRIES), "Name of a country")
PERSON = text(
    lambda rng: rng.choice(words.FIRST_NAMES) if rng.random() < 0.6 else words.full_name(rng),
    "Name of a person",
)
EMAIL = text(_email, "An e-mail address")
PATH = text(_path, "Path of a file")
URL = text(_url, "Address of a page")
OUTPUT = text(_output)
COMMAND = quoted(_command, "A shell command")
DATE = text(_date, "A date, YYYY-MM-DD")
DAY = one_of(*words.WEEKDAYS)
TIME = text(lambda rng: f"{rng.randint(1, 23):02d}:{rng.randrange(0, 60, 5):02d}", "HH:MM")
THING = text(words.thing, "What it is about")
FOOD = text(lambda rng: rng.choice(words.FOODS), "A food")
ANIMAL = text(lambda rng: rng.choice(words.ANIMALS), "An animal")
ROOM = text(lambda rng: rng.choice(words.PLACES), "A room or place")
COLOUR = text(lambda rng: rng.choice(words.COLOURS), "A colour")
LANGUAGE = text(lambda rng: rng.choice(words.LANGUAGES), "A language")
TOPIC = quoted(_topic, "What to look for")
PHRASE = quoted(_phrase, "The text")
WORD = text(words.coined, "A name")
CODE = text(lambda rng: words.hex_id(rng, rng.choice((4, 6, 8))), "An id")
ORDER = text(lambda rng: f"{rng.choice('ABCDEFGHKLMNPRSTX')}{words.digits(rng, 4)}", "A number")
TIMEZONE = text(
    lambda rng: f"{rng.choice(('Europe', 'Asia', 'America', 'Africa'))}/{rng.choice(words.CITIES)}",
    "A timezone, such as Europe/Paris",
)
CURRENCY = one_of("USD", "EUR", "GBP", "JPY", "CHF", "SEK")
WEATHER = one_of("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "stormy", "clear")
STATE = one_of("open", "closed", "waiting", "done", "late", "ready", "cancelled", "new")
