"""Facts of a text as a JSON object, in the form that the request's schema or words ask for."""

from __future__ import annotations

import json
import random
from typing import Any

from leadline.eval.exercise import Chat
from leadline.eval.tasks import values, words
from leadline.eval.tasks.family import assistant, draw_effort, draw_thinking, user
from leadline.eval.tasks.values import Value
from leadline.text.chat import ResponseFormat

# Subject, how a sentence speaks of one, and property -> its kind and how the text says it.
_RECORDS: tuple[tuple[str, Value, str, dict[str, tuple[Value, str]]], ...] = (
    (
        "name",
        values.PERSON,
        "{s}",
        {
            "age": (values.integer(5, 95), "{s} is {v} years old."),
            "city": (values.CITY, "{s} lives in {v}."),
            "email": (values.EMAIL, "The e-mail address of {s} is {v}."),
            "country": (values.COUNTRY, "{s} comes from {v}."),
            "language": (values.LANGUAGE, "{s} speaks {v}."),
            "pet": (values.ANIMAL, "{s} has a pet {v}."),
            "birthday": (values.DATE, "{s} was born on {v}."),
            "hobbies": (values.listing(values.one_of(*words.SUBJECTS), 1, 3), "{s} likes {v}."),
            "height": (values.integer(120, 210), "{s} is {v} cm tall."),
            "room": (values.integer(1, 400), "{s} is in room {v}."),
        },
    ),
    (
        "product",
        values.THING,
        "the {s}",
        {
            "price": (values.decimal(1, 500), "The {s} costs {v} dollars."),
            "weight": (values.integer(1, 90), "The {s} weighs {v} kg."),
            "material": (values.one_of(*words.MATERIALS), "The {s} is made of {v}."),
            "colour": (values.COLOUR, "The {s} comes in {v}."),
            "stock": (values.integer(0, 500), "There are {v} of the {s} in stock."),
            "id": (values.ORDER, "The number of the {s} is {v}."),
            "maker": (values.PERSON, "{v} makes the {s}."),
            "tags": (values.listing(values.WORD, 1, 3), "The {s} has the tags {v}."),
        },
    ),
    (
        "event",
        values.text(lambda rng: f"{rng.choice(words.SUBJECTS)} meeting"),
        "the {s}",
        {
            "date": (values.DATE, "The {s} is on {v}."),
            "time": (values.TIME, "The {s} begins at {v}."),
            "place": (values.ROOM, "The {s} takes place in the {v}."),
            "guests": (values.integer(2, 200), "{v} guests come to the {s}."),
            "speakers": (values.listing(values.PERSON, 1, 3), "At the {s}, {v} will speak."),
            "city": (values.CITY, "The {s} is held in {v}."),
            "status": (values.STATE, "The {s} is {v}."),
        },
    ),
    (
        "ticket",
        values.ORDER,
        "ticket {s}",
        {
            "title": (values.PHRASE, "Ticket {s} has the title {v}."),
            "priority": (values.one_of("low", "medium", "high"), "Ticket {s} has {v} priority."),
            "owner": (values.PERSON, "Ticket {s} belongs to {v}."),
            "status": (values.STATE, "Ticket {s} is {v}."),
            "votes": (values.integer(0, 99), "Ticket {s} has {v} votes."),
            "code": (values.CODE, "The code of ticket {s} is {v}."),
        },
    ),
)
_NUMBERS = ("integer", "number")
_PLAIN = "The {part} of {subject} is {v}."
_ASKS = (
    "Extract the data as JSON.",
    "Give me this as JSON.",
    "Return a JSON object.",
    "Write the facts as JSON.",
    "Convert this to JSON.",
)


def json_output(rng: random.Random, size: int, *, thinking: bool | None = None) -> Chat:
    """One text, one object: keys in the order of the schema, or of the words that ask for them.

    One in three texts is about several subjects, and the object holds a list of objects.
    """
    thinking = draw_thinking(rng, thinking)
    has_schema = rng.random() < 0.6
    key, subject, spoken, parts = rng.choice(_RECORDS)
    names = rng.sample([*parts], rng.randint(1, min(len(parts), max(1, size // 60))))
    # A schema may want a number as a string: it decides, not habit.
    as_text = {
        name
        for name in names
        if has_schema and parts[name][0].schema["type"] in _NUMBERS and rng.random() < 0.4
    }
    several = size > 150 and rng.random() < 0.33
    wholes = []
    sentences: list[str] = []
    for _ in range(rng.randint(2, max(2, min(5, size // 100))) if several else 1):
        whole, said = _draw(rng, key, subject, spoken, parts, names)
        wholes.append({k: str(v) if k in as_text else v for k, v in whole.items()})
        sentences += said
    text = rng.choice((" ", "\n")).join(sentences)
    one: dict[str, Any] = {
        "type": "object",
        "properties": {
            key: dict(subject.schema),
            **{
                name: {"type": "string"} if name in as_text else dict(parts[name][0].schema)
                for name in names
            },
        },
        "required": [key, *names],
    }
    listed = words.listed([key, *names])
    if several:
        answer: dict[str, Any] = {f"{key}s": wholes}
        keys = f"a list {key}s of objects with the keys {listed}"
        schema = {
            "type": "object",
            "properties": {f"{key}s": {"type": "array", "items": one}},
            "required": [f"{key}s"],
        }
    else:
        answer, schema = wholes[0], one
        keys = f"the {'keys' if names else 'key'} {listed}"
    if has_schema:
        form = ResponseFormat("json_schema", {**schema, "additionalProperties": False})
        request = rng.choice(_ASKS)
    else:
        form = ResponseFormat("json_object")
        request = rng.choice(_ASKS).replace(".", f" with {keys}.")
    content = json.dumps(answer, ensure_ascii=False)
    thought = None
    if thinking:
        thought = " ".join(f"{name} is {json.dumps(v)}." for name, v in wholes[0].items())
    order = (f"{text}\n\n{request}", f"{request}\n\n{text}")
    return Chat(
        "json_output",
        [user(rng.choice(order)), assistant(content, thought)],
        wanted=[content],
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
        response_format=form,
    )


def _draw(
    rng: random.Random,
    key: str,
    subject: Value,
    spoken: str,
    parts: dict[str, tuple[Value, str]],
    names: list[str],
) -> tuple[dict[str, Any], list[str]]:
    """An object, and the sentences that say it; a third of the other properties are said too.

    One sentence in three has the form that fits any property but lists.
    """
    name = subject.draw(rng)
    said = []
    whole: dict[str, Any] = {key: name, **dict.fromkeys(names)}
    for part, (value, sentence) in parts.items():
        if part in whole or rng.random() < 0.33:
            drawn = value.draw(rng)
            is_plain = value.schema["type"] != "array" and rng.random() < 0.33
            form = _PLAIN if is_plain else sentence
            about = spoken.format(s=name)
            words_said = form.format(s=name, v=value.say(drawn), part=part, subject=about)
            said.append(words.capital(words_said))
            if part in whole:
                whole[part] = drawn
    rng.shuffle(said)
    return whole, said
