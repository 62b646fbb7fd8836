"""JSON schemas that clients send: their limits, and the forms that values may take in a call."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from reprlib import repr as brief
from typing import Any, NamedTuple, TypeAlias

from leadline.core.errors import BadRequest

Schema: TypeAlias = Mapping[str, Any] | bool

MAX_BYTES = 2**20
MAX_DEPTH = 64

# Keywords whose value is a map from names to schemas: the map is no level of its own.
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "not", "if", "then", "else", "contains", "additionalProperties")
# Keywords that allow every value.
_DEFINITIONS = frozenset({"$comment", "$defs", "$id", "$schema", "definitions"})
_ANNOTATIONS = _DEFINITIONS | {"default", "deprecated", "description", "examples", "title"}
# Keywords of an object that say more of its properties than can be said of each on its own.
_JOINT = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const"}) | {
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedProperties",
}
# Unions inside unions are taken apart this far, and only those of so many parts: references
# would let a small schema grow without end.
_MAX_UNIONS = 2
_MAX_PARTS = 16
# Inside a JSON value each gap holds one of: nothing, a space, a line break with an indent. The
# longest gap is bounded, so a model cannot idle in whitespace (serving-api 9.4).
_WHITESPACE = r" |\n[ \t]{0,32}"


class Text(NamedTuple):
    """Strings as a call shows them, without quotes and escapes.

    Attributes:
        choices: the only strings; None allows every one of a good length.
    """

    choices: tuple[str, ...] | None = None
    min_length: int = 0
    max_length: int | None = None


def load_schema(given: Mapping[str, Any] | str | bool, *, param: str) -> Schema:
    """A checked schema from an object or its text.

    Raises:
        BadRequest: no schema, or one beyond the limits.
    """
    schema = load_json(given, param=param) if isinstance(given, str) else given
    if not isinstance(schema, Mapping | bool):
        raise invalid(f"{param} is {brief(schema)}; a schema is an object or a boolean", param)
    check_schema(schema, param=param)
    return schema


def load_json(text: str, *, param: str) -> Any:
    """What a client sent as the text of a schema or of a structural tag.

    Raises:
        BadRequest: no JSON, or beyond ``MAX_BYTES``.
    """
    check_size(text, param=param)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{param} is not JSON: {error}", param) from None


def check_schema(schema: Schema, *, param: str) -> None:
    """Check nesting and size, which a compiler must not meet unbounded (C43).

    Raises:
        BadRequest: more than ``MAX_DEPTH`` schemas inside each other, or ``MAX_BYTES`` of text.
    """
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        node, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise invalid(f"{param} is nested more than {MAX_DEPTH} levels deep", param)
        waiting += [(child, depth + 1) for child in _children(node)]
    check_size(json.dumps(schema), param=param)


def check_size(text: str, *, param: str, limit: int = MAX_BYTES) -> None:
    """Check that a grammar of any notation is of a size that compiles in time.

    Raises:
        BadRequest: more than ``limit`` bytes.
    """
    if (size := len(text.encode("utf-8", "replace"))) > limit:
        raise invalid(f"{param} has {size} bytes; at most {limit} are allowed", param)


def invalid(message: str, param: str) -> BadRequest:
    """The error of a schema, regular expression or grammar that cannot be used."""
    return BadRequest(message, param=param, code="invalid_schema")


def close_schema(schema: Any) -> Any:
    """A schema whose objects hold exactly their declared properties (serving-api 2.4, C8).

    ``additionalProperties`` and ``required`` follow ``properties``, where the model's makers
    write them; all other keys stay as sent.
    """
    if not isinstance(schema, Mapping):
        return schema
    plain = {key: _closed_part(key, value) for key, value in schema.items()}
    if plain.get("type") != "object" and "properties" not in plain:
        return plain
    plain.setdefault("properties", {})
    closed: dict[str, Any] = {}
    for key, value in plain.items():
        if key == "properties":
            required = list(value) if isinstance(value, Mapping) else []
            closed |= {key: value, "additionalProperties": False, "required": required}
        elif key not in ("additionalProperties", "required"):
            closed[key] = value
    return closed


def _closed_part(key: str, value: Any) -> Any:
    if key in _SCHEMAS:
        return close_schema(value)
    if key in _SCHEMA_MAPS and isinstance(value, Mapping):
        return {name: close_schema(part) for name, part in value.items()}
    if key in _SCHEMA_LISTS and isinstance(value, Sequence):
        return [close_schema(part) for part in value]
    return value


def json_rule(schema: Schema, *, lenient: bool = False) -> str:
    """The right side of a Lark rule for the JSON values of a schema.

    Args:
        schema: checked by ``check_schema``.
        lenient: keywords that cannot be enforced are ignored, instead of an error.
    """
    schema = {} if schema is True else schema
    if not isinstance(schema, Mapping):
        return f"%json {json.dumps(schema)}"  # matches nothing, which is an error of the compiler
    options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE}
    if lenient:
        options["lenient"] = True
    return "%json " + json.dumps({**schema, "x-guidance": options})


def property_names(schema: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The only names that properties of an object can have; None when others may come too."""
    if "properties" not in schema or joint_keywords(schema):
        return None
    return tuple(schema["properties"])


def joint_keywords(schema: Mapping[str, Any]) -> list[str]:
    """What keeps an object's schema from being enforced property by property."""
    keywords = [key for key in schema if key in _JOINT]
    if schema.get("additionalProperties"):
        keywords.append("additionalProperties")
    if schema.get("type", "object") != "object":
        keywords.append("type")
    if not isinstance(schema.get("properties", {}), Mapping):
        keywords.append("properties")
    return keywords


def value_forms(
    schema: Any, root: Mapping[str, Any], *, unions: int = _MAX_UNIONS
) -> Iterator[Text | Schema]:
    """What a property's value may be: strings that need no quotes, and schemas of JSON values.

    Strings with a pattern or a format stay JSON, where both can be enforced. Forms with references
    hold a copy of the root each, so a reader takes one at a time and stops when they are too many.

    Args:
        schema: of the property.
        root: the schema that its references point into.
        unions: how many more unions inside unions are taken apart.
    """
    schema = _resolve(schema, root)
    if not isinstance(schema, Mapping):
        yield from (Text(), True) if schema is True else (schema,)
        return
    keywords = schema.keys() - _ANNOTATIONS
    parts = schema.get("anyOf")
    parts = parts if isinstance(parts, list) and len(parts) <= _MAX_PARTS else []
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    lengths = (schema.get("minLength", 0), schema.get("maxLength"))
    if not keywords:
        yield from (Text(), True)
    elif keywords == {"anyOf"} and parts and unions:
        for part in parts:
            yield from value_forms(part, root, unions=unions - 1)
    elif "const" in keywords and keywords <= {"type", "const"}:
        yield from _constant_forms([schema["const"]], types)
    elif keywords <= {"type", "enum"} and isinstance(schema.get("enum"), list) and schema["enum"]:
        yield from _constant_forms(schema["enum"], types)
    elif (
        keywords <= {"type", "minLength", "maxLength"}
        and "string" in types
        and all(length is None or (type(length) is int and length >= 0) for length in lengths)
    ):
        yield Text(None, *lengths)
        if others := [kind for kind in types if kind != "string"]:
            yield {"type": others}
    else:
        yield _standalone(schema, root)


def _constant_forms(values: list[Any], types: list[Any]) -> Iterator[Text | Schema]:
    strings = tuple(value for value in values if isinstance(value, str))
    if strings and (types == [None] or "string" in types):
        yield Text(strings)
    others = [value for value in values if not isinstance(value, str)]
    if others:
        kinds = {} if types == [None] else {"type": types}
        yield {**kinds, "enum": others}


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key in _SCHEMA_MAPS and isinstance(value, Mapping):
                yield from value.values()
            elif isinstance(value, list):
                yield from (item for item in value if isinstance(item, Mapping | list))
            elif isinstance(value, Mapping):
                yield value
    elif isinstance(node, list):
        yield from node


def _resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema that is only a reference refers to; itself where that cannot be found."""
    seen: set[str] = set()
    while isinstance(schema, Mapping) and schema.keys() - _ANNOTATIONS == {"$ref"}:
        reference = schema["$ref"]
        if not isinstance(reference, str) or reference in seen:
            break
        seen.add(reference)
        target = resolve_reference(reference, root)
        if target is None:
            break
        schema = target
    return schema


def resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference into the same schema points at; None for any other."""
    if not reference.startswith("#/"):
        return None
    target: Any = root
    for step in reference[2:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        target = target.get(step) if isinstance(target, Mapping) else None
    return target


def _standalone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Schema:
    """The same schema as a document of its own: references lead to a copy of the root in it."""
    moved = _move_references(schema)
    if moved == schema:
        return schema
    return {**moved, "$defs": {"root": _move_references(root)}}


def _move_references(node: Any) -> Any:
    if isinstance(node, Mapping):
        moved = {key: _move_references(value) for key, value in node.items()}
        reference = node.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = "#/$defs/root" + reference[1:]
        return moved
    return [_move_references(item) for item in node] if isinstance(node, list) else node
