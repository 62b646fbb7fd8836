"""Tools that were never seen: their names and arguments have to be read in the schema."""

from __future__ import annotations

import random
from collections.abc import Mapping

from leadline.eval.tasks import values, words
from leadline.eval.tasks.tools.blueprint import Blueprint, Field
from leadline.eval.tasks.values import Value

_ACTIONS = words.of(
    "get find check update start stop add remove open close print send load store count list reset "
    "lock move copy rename archive publish review approve reject assign export import merge split "
    "sort clean repair test inspect record rate rank plan book rent lease ship pack sign scan"
)
_FIELDS: tuple[tuple[str, Value], ...] = (
    ("name|owner|user|author|customer|member|guest|player", values.PERSON),
    ("city|location|destination|origin|town", values.CITY),
    ("place|room|zone|area|site", values.ROOM),
    ("count|amount|quantity|total|n|limit|max_results", values.integer(1, 99)),
    ("level|rank|score|priority|rating", values.integer(1, 10)),
    ("id_number|year|value|threshold|offset", values.integer(100, 9999)),
    ("size|format", values.one_of("small", "medium", "large")),
    ("mode|strategy|speed", values.one_of("fast", "slow", "safe", "auto")),
    ("unit|scale", values.one_of("metric", "imperial")),
    ("color|colour|background", values.COLOUR),
    ("label|title|group|kind|category|target|source|key|branch", values.WORD),
    ("id|token|hash|uuid|session_id", values.CODE),
    ("number|order_id|ticket|invoice|code", values.ORDER),
    ("date|deadline|start_date|day_of_birth", values.DATE),
    ("time|start|end|at", values.TIME),
    ("day|weekday", values.DAY),
    ("note|message|text|comment|body|content|reason", values.PHRASE),
    ("query|topic|question", values.TOPIC),
    ("language|lang", values.LANGUAGE),
    ("email|contact|sender", values.EMAIL),
    ("path|file|input|output", values.PATH),
    ("url|link|page", values.URL),
    ("weight|length|height|ratio|factor", values.decimal(1, 99)),
    ("items|ingredients|foods", values.listing(values.FOOD, 2, 3)),
    ("tags|labels|names|keywords", values.listing(values.WORD, 1, 3)),
    ("numbers|ids|pages", values.listing(values.integer(1, 99), 2, 4)),
    ("country|nation", values.COUNTRY),
    ("animal|pet|species", values.ANIMAL),
    ("item|product|object|device", values.THING),
    (
        "range|window|limits",
        values.record("{low} to {high}", low=values.integer(1, 50), high=values.integer(51, 99)),
    ),
    (
        "position|point",
        values.record("{x}, {y}", x=values.integer(0, 99), y=values.integer(0, 99)),
    ),
)
_RESULTS: tuple[tuple[str, Value], ...] = (
    ("status", values.STATE),
    ("reference", values.CODE),
    ("total", values.integer(0, 999)),
    ("owner", values.PERSON),
    ("place", values.ROOM),
    ("price", values.integer(1, 999)),
    ("message", values.PHRASE),
    ("score", values.decimal(0, 10)),
    ("date", values.DATE),
    ("colour", values.COLOUR),
)


def invent(rng: random.Random) -> Blueprint:
    """A tool that was never seen: a verb, a noun, and arguments from a common stock."""
    action = rng.choice(_ACTIONS)
    noun = rng.choice((rng.choice(words.OBJECTS), rng.choice(words.ANIMALS), words.coined(rng)))
    fields = rng.sample(_FIELDS, rng.choice((0, 1, 1, 1, 2, 2, 3, 4)))
    required = {rng.choice(names.split("|")): value for names, value in fields}
    result: dict[str, Field] = {"text": values.PHRASE}
    answer = "The tool says: {text}"
    if rng.random() < 0.7:
        result = dict(rng.sample(_RESULTS, rng.choice((1, 2, 2, 3))))
        answer = ""
    name = f"{action}_{noun}"
    if rng.random() < 0.2:
        name = rng.choice((f"{noun}_{action}", f"{action}{noun.capitalize()}", noun))
    asks = _asks(action, noun, required)
    description = rng.choice(
        ("", f"{action.capitalize()} the {noun}", f"{action.capitalize()} {noun}s")
    )
    return Blueprint((name,), description, required, {}, asks, result, answer)


def _asks(action: str, noun: str, required: Mapping[str, Value]) -> tuple[str, ...]:
    action = action.capitalize()
    if not required:
        return (f"{action} the {noun}.", f"{action} the {noun} now.")
    said = words.listed([f"{name} {{{name}}}" for name in required])
    asks = [f"{action} the {noun} with {said}.", f"{action} the {noun}: {said}."]
    if len(required) == 1:
        asks += [f"{action} the {noun} for {{{name}}}." for name in required]
    return tuple(asks)
