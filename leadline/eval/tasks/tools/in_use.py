"""Tools as a conversation offers them, and calls of them: request, arguments, result, answer."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from leadline.eval.tasks import words
from leadline.eval.tasks.tools import BLUEPRINTS
from leadline.eval.tasks.tools.blueprint import Blueprint
from leadline.eval.tasks.tools.invented import invent
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
        spoken: the arguments in words.
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


@dataclass(frozen=True, slots=True)
class Link:
    """A field of one tool's result that can be an argument of another.

    Attributes:
        argument: by its name in the target's templates.
    """

    source: Offered
    field: str
    target: Offered
    argument: str


def links_from(source: Offered, offered: list[Offered]) -> list[Link]:
    """How the result of a tool can be used by others: value and argument are of one kind."""
    return [
        Link(source, field, target, key.split("|")[0])
        for target in offered
        if target is not source and _feeds(source.blueprint, target.blueprint)
        for field, returned in source.blueprint.result.items()
        for key, wanted in target.blueprint.required.items()
        if wanted is returned
    ]


def offer(rng: random.Random, count: int) -> list[Offered]:
    """Different tools, one in four never seen before; now and then two that work together."""
    known = rng.sample(BLUEPRINTS, count)
    blueprints = [invent(rng) if rng.random() < 0.25 else blueprint for blueprint in known]
    if count > 1 and rng.random() < 0.3:
        blueprints[:2] = rng.choice(_PAIRS)
        rng.shuffle(blueprints)
    offered: dict[str, Offered] = {}
    for blueprint in blueprints:
        tool = settle(rng, blueprint)
        offered.setdefault(tool.tool.name, tool)
    return list(offered.values())


def _feeds(source: Blueprint, target: Blueprint) -> bool:
    """Whether a field of a result is of the kind of a required argument."""
    fields = [] if [*source.result] == ["text"] else source.result.values()
    return any(value is field for value in target.required.values() for field in fields)


_PAIRS = [(a, b) for a in BLUEPRINTS for b in BLUEPRINTS if a is not b and _feeds(a, b)]


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
            description = value.description or f"The {chosen.replace('_', ' ')}"
            if rng.random() < 0.2:  # an example that is never what the user wants
                description += f", e.g. {value.say(value.draw(rng))}"
            schema["description"] = description
        properties[chosen] = schema
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if blueprint.required:
        parameters["required"] = [names[key.split("|")[0]] for key in blueprint.required]
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    end = "." if rng.random() < 0.5 and blueprint.description else ""
    return Offered(blueprint, Tool(name, f"{blueprint.description}{end}", parameters), names)


def draw_call(
    rng: random.Random,
    offered: Offered,
    *,
    spelled_out: bool = False,
    only_required: bool = False,
    fixed: Mapping[str, tuple[Any, str]] = MappingProxyType({}),
) -> Call:
    """A call of a tool.

    Args:
        rng: decides everything.
        offered: the tool.
        spelled_out: the request names the tool and its arguments.
        only_required: optional arguments are left out.
        fixed: arguments by their names in the templates: the value, and how it is said.
    """
    blueprint = offered.blueprint
    template = rng.choice(blueprint.asks)
    given = {key.split("|")[0]: value.draw(rng) for key, value in blueprint.required.items()}
    said = {
        key.split("|")[0]: value.say(given[key.split("|")[0]])
        for key, value in blueprint.required.items()
    }
    given |= {key: one for key, (one, _) in fixed.items()}
    shown = {**said, **{key: str(one) for key, (one, _) in fixed.items()}}
    said |= {key: text for key, (_, text) in fixed.items()}
    extra = ""
    if not only_required and (spelled_out or "{+}" in template):
        for key, (value, phrase) in blueprint.optional.items():
            if rng.random() < 0.4:
                given[key] = value.draw(rng)
                said[key] = shown[key] = value.say(given[key]) or "true"
                extra += phrase.format(said[key])
    spoken = {offered.names[key]: text for key, text in shown.items()}
    if spelled_out:
        request = _spelled_out(rng, offered.tool.name, spoken)
    else:
        request = template.replace("{+}", extra).format(**said)
    result, answer, counts = _result(rng, blueprint, given)
    arguments = {offered.names[key]: one for key, one in given.items()}
    return Call(
        offered.tool.name, words.capital(request), arguments, spoken, result, answer, counts
    )


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
    rng: random.Random, blueprint: Blueprint, given: Mapping[str, Any]
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
    if blueprint.answer:
        answer = blueprint.answer.format(**{**given, **told})
    else:
        parts = [f"the {name.replace('_', ' ')} is {value}" for name, value in told.items()]
        answer = words.capital(f"{words.listed(parts)}.")
    counts = next((text for text in told.values() if text in answer), answer.rstrip("."))
    result = fields["text"] if list(fields) == ["text"] else json.dumps(fields)
    return result, answer, counts


_BEFORE_WISH = ("Please {}", "Can you {}?", "Could you {}?", "I want you to {}", "Now {}")
_BEFORE_ANY = ("Hi! {}", "Hello. {}", "Hey, {}", "Quick one: {}", "{} Thanks!")


def polite(rng: random.Random, request: str) -> str:
    """A request as people put it; half of the time unchanged."""
    form = rng.random()
    if form < 0.5:
        return request
    if form < 0.8 and request.endswith(".") and request.split(" ", 1)[0] in _IMPERATIVES:
        frame = rng.choice(_BEFORE_WISH)
        wish = request[0].lower() + request[1:]
        return frame.format(wish.rstrip(".") if frame.endswith("?") else wish)
    return rng.choice(_BEFORE_ANY).format(request)


_IMPERATIVES = frozenset(
    ask.split(" ", 1)[0]
    for blueprint in BLUEPRINTS
    for ask in blueprint.asks
    if ask.endswith(".") and ask[0].isupper()
) - frozenset(("I", "Ticket", "Task", "Volume", "Wake"))
