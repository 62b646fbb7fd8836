"""Parameters of a tool call -> its JSON arguments, as they arrive (serving-api 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from leadline.text.blanks import Blanks
from leadline.text.json_schema import resolve_reference

_JSON_TYPES = frozenset({"string", "boolean", "integer", "number", "object", "array", "null"})
_TYPE_OF_FIRST = {
    "{": "object",
    "[": "array",
    '"': "string",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
}
# References and unions are followed this deep.
_MAX_DEPTH = 16
# Names under which models wrap all arguments into one.
_WRAPPERS = ("arguments", "input")
# Characters of a string that may wait for a repetition of their parameter.
_MAX_HELD = 64

_encode = msgspec.json.Encoder().encode
_check = msgspec.json.Decoder(msgspec.Raw).decode
_decode_string = msgspec.json.Decoder(str).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(slots=True)
class _Parameter:
    """The parameter that is being read.

    Attributes:
        types: declared JSON types; empty where they are not known.
        may_flow: it will be a JSON string, whatever follows.
        newlines: those at its end: without a closing tag they only separate it from what follows.
        pieces: text that was not sent.
    """

    name: str
    is_string: bool
    types: frozenset[str]
    may_flow: bool
    newlines: Blanks = field(default_factory=lambda: Blanks("\n"))
    pieces: list[str] = field(default_factory=list)
    num_held: int = 0


class ArgumentsWriter:
    """Writes the arguments of one call.

    The joined fragments are one JSON object without duplicate keys, for any input.

    The last of several parameters of one name wins, as far as nothing of it was sent: values wait
    for the end of the call until a string grows beyond 64 characters. Then all that waits is sent,
    the string flows as it is generated (C23), and later values of names that were sent are dropped.

    Args:
        schema: the tool's JSON schema; None where the tool is not known.
        coerces: whether declared types win over what the model says.
    """

    def __init__(self, schema: Mapping[str, Any] | None, *, coerces: bool) -> None:
        self._schema = schema or {}
        self._coerces = coerces
        self._sent: set[str] = set()
        self._waiting: dict[str, str] = {}  # name -> JSON
        self._body: list[str] = []
        self._open: _Parameter | None = None
        self._flows = False

    def open(self, name: str, *, is_string: bool) -> str:
        """Begin a parameter; one that is still open ends."""
        fragment = self.close()
        types = self._types(name)
        may_flow = (
            is_string
            and (not types or "string" in types)
            and name not in self._sent
            and not (self._is_wrapper(name) and not self._sent and not self._waiting)
        )
        self._open = _Parameter(name, is_string, types, may_flow)
        return fragment

    def push(self, text: str) -> str:
        """Take text of the open parameter, or of the call's body where none is open."""
        parameter = self._open
        if parameter is None:
            self._body.append(text)
            return ""
        text = parameter.newlines.push(text)
        if self._flows:
            return _escape(text)
        parameter.pieces.append(text)
        parameter.num_held += len(text)
        if parameter.num_held <= _MAX_HELD or not parameter.may_flow:
            return ""
        self._flows = True
        return self._send_open(parameter)

    def close(self, *, is_explicit: bool = False) -> str:
        """End the open parameter, if any; newlines at its end are its own before a closing tag."""
        parameter, self._open = self._open, None
        if parameter is None:
            return ""
        newlines = parameter.newlines.drop() if is_explicit else ""
        if self._flows:
            self._flows = False
            return _escape(newlines) + '"'
        if parameter.name not in self._sent:
            text = "".join([*parameter.pieces, newlines])
            self._waiting[parameter.name] = to_json(
                text, is_string=parameter.is_string, types=parameter.types
            )
        return ""

    def finish(self) -> str:
        """End the call: what is left of its arguments, so that they parse (C22)."""
        fragment = self.close()
        if not self._sent:
            self._repair()
        fragment += self._send_waiting()
        return fragment + ("}" if self._sent else "{}")

    def cut(self) -> str:
        """What is known and was not sent, left open: the output was cut inside the call (C25)."""
        if self._open is not None and self._open.may_flow and not self._flows:
            return self._send_open(self._open)
        return self._send_waiting()

    def _send_open(self, parameter: _Parameter) -> str:
        """All that waits, then the open string as far as it is known."""
        self._waiting.pop(parameter.name, None)  # the later one wins
        start = self._send_waiting() + self._key(parameter.name)
        return f'{start}"{_escape("".join(parameter.pieces))}'

    def _send_waiting(self) -> str:
        waiting, self._waiting = self._waiting, {}
        return "".join([self._key(name) + value for name, value in waiting.items()])

    def _key(self, name: str) -> str:
        start = ", " if self._sent else "{"
        self._sent.add(name)
        return f"{start}{_quote(name)}: "

    def _types(self, name: str) -> frozenset[str]:
        return declared_types(self._schema, name) if self._coerces else frozenset()

    def _is_wrapper(self, name: str) -> bool:
        properties = _properties(self._schema)
        return name in _WRAPPERS and bool(properties) and name not in properties

    def _repair(self) -> None:
        """Take arguments that came as one JSON object: as the call's body, or wrapped."""
        values = None
        if not self._waiting:
            values = _members("".join(self._body))
        elif len(self._waiting) == 1 and self._is_wrapper(*self._waiting):
            [value] = self._waiting.values()
            values = _members(_decode_string(value) if value.startswith('"') else value)
            if values is not None and not values.keys() <= _properties(self._schema).keys():
                return
        if values is not None:
            self._waiting = {
                name: to_json(value, is_string=False, types=self._types(name))
                for name, value in values.items()
            }


def to_json(text: str, *, is_string: bool, types: frozenset[str]) -> str:
    """One parameter's value as JSON; numbers keep the model's spelling (C21).

    Args:
        text: between the tags, verbatim.
        is_string: whether the model calls it a string; else it should be JSON, and becomes a
            string where it is not.
        types: declared JSON types; empty keeps what the model said.
    """
    kind = json_type(text)
    wants_string = "string" in types
    if is_string:
        is_other = kind in types and not wants_string
        return text.strip() if is_other else _quote(text)
    if kind is None or (wants_string and kind not in types):
        return _quote(text)
    if kind == "string" and types and not wants_string:
        inner = _decode_string(text)
        if json_type(inner) in types:
            return inner.strip()
    return text.strip()


def json_type(text: str) -> str | None:
    """The JSON schema type of a JSON text; None if it is no JSON, such as ``NaN``."""
    try:
        _check(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    plain = text.strip()
    kind = _TYPE_OF_FIRST.get(plain[0])
    if kind is not None:
        return kind
    return "integer" if plain.lstrip("-").isdecimal() else "number"


def declared_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """JSON types that a tool's schema allows for a property; empty if it does not say clearly."""
    return _types_of(_properties(schema).get(name), schema, {}, 0)


def _types_of(
    schema: Any, root: Mapping[str, Any], known: dict[str, frozenset[str]], depth: int
) -> frozenset[str]:
    """``known``: types behind references; each is followed once, so that none costs much."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = frozenset()  # in case it leads back to itself
            known[reference] = _types_of(resolve_reference(reference, root), root, known, depth + 1)
        return known[reference]
    kinds = schema.get("type")
    branches = schema.get("anyOf") or schema.get("oneOf") or _only(schema.get("allOf"))
    if isinstance(kinds, str):
        types = frozenset({kinds})
    elif isinstance(kinds, (list, tuple)):
        types = frozenset(kind for kind in kinds if isinstance(kind, str))
    elif isinstance(branches, (list, tuple)):
        parts = [_types_of(branch, root, known, depth + 1) for branch in branches]
        types = frozenset().union(*parts) if all(parts) else frozenset()
    else:
        return frozenset()
    if not types <= _JSON_TYPES:
        return frozenset()
    if schema.get("nullable") is True:  # OpenAPI's spelling
        types |= {"null"}
    return types | {"integer"} if "number" in types else types


def _only(branches: Any) -> Any:
    """A list of one, which schema writers wrap around references; None for any other."""
    return branches if isinstance(branches, (list, tuple)) and len(branches) == 1 else None


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _members(text: str) -> dict[str, str] | None:
    """Name -> JSON of an object's members, the last of each name; None for any other text."""
    if json_type(text) != "object":
        return None
    return {name: bytes(raw).decode() for name, raw in _decode_object(text).items()}


def _quote(text: str) -> str:
    return _encode(text).decode()


def _escape(text: str) -> str:
    return _encode(text)[1:-1].decode()
