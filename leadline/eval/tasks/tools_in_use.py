"""Tools as a conversation offers them, and calls of them: request, arguments, result, answer."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leadline.eval.tasks import values, words
from leadline.eval.tasks.toolbox import BLUEPRINTS, Blueprint
from leadline.eval.tasks.values import Value
from leadline.text.chat import Tool


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool with its names settled.

    Attributes:
        blueprint: where it comes from.
        tool: what the prompt shows.
        names: of each argument in the blueprint's templates, its name in the schema.
    """

    blueprint: Blueprint
    tool: Tool
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Call:
    """A call with all that belongs to it.

    Attributes:
        name: of the tool.
        request: what the user says.
        arguments: by their names in the schema.
        spoken: the arguments as the request says them.
        result: what the tool returns.
        answer: what the assistant tells the user then.
        value: what in the answer comes from the result.
    """

    name: str
    request: str
    arguments: Mapping[str, Any]
    spoken: Mapping[str, str]
    result: str
    answer: str
    value: str

    def message(self, call_id: str) -> dict[str, Any]:
        """The call in an assistant's message."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def thought(self) -> str:
        """The call in words."""
        if not self.spoken:
            return f"I call {self.name}."
        parts = [f"{name} {value}".rstrip() for name, value in self.spoken.items()]
        return f"I call {self.name} with {words.listed(parts)}."


def offer(rng: random.Random, count: int) -> list[Offered]:
    """Different tools; about one in four was never seen before and has to be read."""
    known = rng.sample(BLUEPRINTS, count)
    blueprints = [invent(rng) if rng.random() < 0.25 else blueprint for blueprint in known]
    offered: dict[str, Offered] = {}
    for blueprint in blueprints:
        tool = settle(rng, blueprint)
        offered.setdefault(tool.tool.name, tool)
    return list(offered.values())


def settle(rng: random.Random, blueprint: Blueprint) -> Offered:
    """Choose names for a tool and its arguments, and how much its schema explains."""
    first = rng.random() < 0.5
    name = blueprint.names[0] if first else rng.choice(blueprint.names)
    explains = rng.random() < 0.6
    names: dict[str, str] = {}
    properties: dict[str, Any] = {}
    optional = {name: value for name, (value, _) in blueprint.optional.items()}
    for key, value in (*blueprint.required.items(), *optional.items()):
        choices = key.split("|")
        chosen = choices[0] if first else rng.choice(choices)
        names[choices[0]] = chosen
        schema = dict(value.schema)
        if explains:
            schema["description"] = value.description or f"The {chosen.replace('_', ' ')}"
        properties[chosen] = schema
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if blueprint.required:
        parameters["required"] = [names[key.split("|")[0]] for key in blueprint.required]
    end = "." if rng.random() < 0.5 else ""
    return Offered(blueprint, Tool(name, f"{blueprint.description}{end}", parameters), names)


def draw_call(
    rng: random.Random,
    offered: Offered,
    *,
    spelled_out: bool = False,
    only_required: bool = False,
) -> Call:
    """A call of a tool.

    Args:
        rng: decides everything.
        offered: the tool.
        spelled_out: the request names the tool and its arguments.
        only_required: optional arguments are left out.
    """
    blueprint = offered.blueprint
    template = rng.choice(blueprint.asks)
    given = {key.split("|")[0]: value.draw(rng) for key, value in blueprint.required.items()}
    said = {
        key.split("|")[0]: value.say(given[key.split("|")[0]])
        for key, value in blueprint.required.items()
    }
    extra = ""
    if not only_required and (spelled_out or "{+}" in template):
        for key, (value, phrase) in blueprint.optional.items():
            if rng.random() < 0.4:
                given[key] = value.draw(rng)
                said[key] = value.say(given[key]) or "true"
                extra += phrase.format(said[key])
    spoken = {offered.names[key]: text for key, text in said.items()}
    if spelled_out:
        request = _spelled_out(rng, offered.tool.name, spoken)
    else:
        request = template.replace("{+}", extra).format(**said)
    result, answer, value = _result(rng, blueprint, given, said)
    arguments = {offered.names[key]: one for key, one in given.items()}
    return Call(offered.tool.name, words.capital(request), arguments, spoken, result, answer, value)


def _spelled_out(rng: random.Random, name: str, spoken: Mapping[str, str]) -> str:
    verb = rng.choice(("Call", "Use", "Please call", "Run the tool"))
    if not spoken:
        return f"{verb} {name}."
    if len(spoken) == 1 and rng.random() < 0.6:
        return f"{verb} {name} {rng.choice(('for', 'with', 'on'))} {next(iter(spoken.values()))}."
    link = rng.choice((" ", " = ", ": ", " set to "))
    parts = [f"{key}{link}{value}" for key, value in spoken.items()]
    return f"{verb} {name} with {words.listed(parts)}."


def _result(
    rng: random.Random, blueprint: Blueprint, given: Mapping[str, Any], said: Mapping[str, str]
) -> tuple[str, str, str]:
    """What the tool returns, what is said then, and what of it counts."""
    fields: dict[str, Any] = {}
    told: dict[str, str] = {}
    for name, source in blueprint.result.items():
        if isinstance(source, Value):
            fields[name] = source.draw(rng)
            told[name] = words.listed(fields[name]) if isinstance(fields[name], list) else ""
        else:
            fields[name] = source(given)
        told[name] = told.get(name) or str(fields[name])
    bare = {key: text.strip('"') for key, text in said.items()}
    if blueprint.answer:
        answer = blueprint.answer.format(**{**bare, **told})
    else:
        parts = [f"the {name.replace('_', ' ')} is {value}" for name, value in told.items()]
        answer = words.capital(f"{words.listed(parts)}.")
    value = next((text for text in told.values() if text in answer), answer.rstrip("."))
    result = fields["text"] if list(fields) == ["text"] else json.dumps(fields)
    return result, answer, value


_ACTIONS = words.of(
    "get find check update start stop add remove open close print send load store count list reset "
    "lock move copy rename archive publish review approve reject assign export import merge split "
    "sort clean repair test inspect record rate rank plan book rent lease ship pack sign scan"
)
_FIELDS: tuple[tuple[str, Value], ...] = (
    ("name", values.PERSON),
    ("owner", values.PERSON),
    ("city", values.CITY),
    ("place", values.ROOM),
    ("count", values.integer(1, 99)),
    ("amount", values.integer(1, 9999)),
    ("level", values.integer(1, 10)),
    ("size", values.one_of("small", "medium", "large")),
    ("mode", values.one_of("fast", "slow", "safe", "auto")),
    ("colour", values.COLOUR),
    ("label", values.WORD),
    ("id", values.CODE),
    ("date", values.DATE),
    ("time", values.TIME),
    ("day", values.DAY),
    ("note", values.PHRASE),
    ("language", values.LANGUAGE),
    ("email", values.EMAIL),
    ("path", values.PATH),
    ("weight", values.decimal(1, 99)),
    ("items", values.listing(values.FOOD, 2, 3)),
    ("tags", values.listing(values.WORD, 1, 3)),
    ("country", values.COUNTRY),
    ("number", values.ORDER),
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
    required = dict(rng.sample(_FIELDS, rng.choice((1, 1, 2, 2, 3))))
    said = words.listed([f"{name} {{{name}}}" for name in required])
    short = " ".join(f"{{{name}}}" for name in required)
    asks = [f"{action} the {noun} with {said}.", f"please {action} a {noun}: {said}."]
    if len(required) == 1:
        asks += [f"{action} the {noun} for {short}.", f"{action} {noun} {short}."]
    result = {"text": values.PHRASE}
    answer = "The tool says: {text}"
    if rng.random() < 0.7:
        result = dict(rng.sample(_RESULTS, rng.choice((1, 2, 2, 3))))
        answer = ""
    name = f"{action}_{noun}" if rng.random() < 0.8 else f"{noun}_{action}"
    description = rng.choice(
        ("", f"{action.capitalize()} a {noun}", f"{action.capitalize()} {noun}s")
    )
    return Blueprint((name,), description, required, {}, tuple(asks), result, answer)
