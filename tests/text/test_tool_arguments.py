"""Arguments: one JSON object of the declared types, whatever the model wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.text.tool_arguments import ArgumentsWriter, declared_types, json_type, to_json
from tests.text.answers import parse_arguments

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "count": {"type": "integer"},
        "items": {"type": "array"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "other": {"$ref": "#/$defs/Other"},
        "nullable": {"type": "boolean", "nullable": True},
        "loop": {"$ref": "#/properties/loop"},
        "wrapped": {"allOf": [{"$ref": "#/$defs/Other"}]},
        "wide": {"oneOf": [{"$ref": "#/$defs/Wide"}] * 50},
        "vague": {"anyOf": [{"type": "integer"}, {"description": "anything"}]},
        "lost": {"$ref": "#/$defs/Missing/x"},
        "remote": {"$ref": "https://example.com/schema"},
        "strange": {"type": "any"},
        "bare": True,
    },
    "$defs": {
        "Other": {"type": "object"},
        "Wide": {"anyOf": [{"$ref": "#/$defs/Wider"}] * 50},
        "Wider": {"anyOf": [{"$ref": "#/$defs/Widest"}] * 50},
        "Widest": {"anyOf": [{"$ref": "#/$defs/Other"}, {"type": "null"}] * 50},
    },
}


def write(*parameters: tuple[str, bool, str], schema: Any = SCHEMA, coerces: bool = True) -> str:
    """The finished arguments of (name, is string, value) parameters."""
    writer = ArgumentsWriter(schema, coerces=coerces)
    text = ""
    for name, is_string, value in parameters:
        text += writer.open(name, is_string=is_string) + writer.push(value)
        text += writer.close(is_explicit=True)
    return text + writer.finish()


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("text", {"string"}),
        ("number", {"number", "integer"}),
        ("maybe", {"integer", "null"}),
        ("either", {"string", "integer"}),
        ("other", {"object"}),
        ("nullable", {"boolean", "null"}),
        ("wrapped", {"object"}),
        ("wide", {"object", "null"}),
        *[(name, set()) for name in ("loop", "vague", "lost", "remote", "strange", "bare", "no")],
    ],
)
def test_declared_types_are_those_that_the_schema_says_clearly(name: str, types: set[str]) -> None:
    assert declared_types(SCHEMA, name) == types


@pytest.mark.parametrize("schema", [{}, {"properties": None}, {"properties": {"a": []}}])
def test_odd_schemas_declare_nothing(schema: Any) -> None:
    assert declared_types(schema, "a") == frozenset()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("3", "integer"),
        ("-0", "integer"),
        ("123456789012345678901234567890", "integer"),
        ("1.10", "number"),
        ("1e999", "number"),
        (" true\n", "boolean"),
        ("null", "null"),
        ('"a"', "string"),
        ("[1, {}]", "array"),
        ("{}", "object"),
        *[(text, None) for text in ("NaN", "-Infinity", "nope", "", " ", "{}{}", "[1,]", "01")],
        ("True", None),
        ("[" * 100_000, None),
    ],
)
def test_json_is_read_strictly(text: str, kind: str | None) -> None:
    assert json_type(text) == kind


@pytest.mark.parametrize(
    ("types", "is_string", "text", "want"),
    [
        # As the model said.
        ((), True, " a\n", '" a\\n"'),
        ((), True, "3", '"3"'),
        ((), False, " 3\n", "3"),
        ((), False, "1.10", "1.10"),
        ((), False, "12345678901234567890123", "12345678901234567890123"),
        # No JSON.
        ((), False, "nope", '"nope"'),
        ((), False, "NaN", '"NaN"'),
        (("number",), False, "Infinity", '"Infinity"'),
        # A string where another type is declared.
        (("boolean",), True, "true", "true"),
        (("integer",), True, "3", "3"),
        (("integer", "null"), True, "null", "null"),
        (("array",), True, ' ["a"] ', '["a"]'),
        (("object",), True, '{"a": 1}', '{"a": 1}'),
        (("integer",), False, '"3"', "3"),
        (("integer",), True, "three", '"three"'),
        (("integer",), True, "3.5", '"3.5"'),
        (("integer",), False, '"three"', '"three"'),
        # Another type where a string is declared.
        (("string",), False, "42", '"42"'),
        (("string",), False, '{"a": 1}', '"{\\"a\\": 1}"'),
        (("string",), False, '"a"', '"a"'),
        # In doubt.
        (("string", "integer"), True, "3", '"3"'),
        (("string", "integer"), False, "3", "3"),
        (("string", "null"), False, "null", "null"),
        (("boolean",), False, "3", "3"),
    ],
)
def test_c21_value_takes_its_declared_type(
    types: tuple[str, ...], is_string: bool, text: str, want: str
) -> None:
    assert to_json(text, is_string=is_string, types=frozenset(types)) == want


def test_c22_no_parameters_are_an_empty_object() -> None:
    assert write() == "{}"


def test_c21_without_coercion_values_stay_as_the_model_said() -> None:
    assert write(("count", True, "3"), coerces=False) == '{"count": "3"}'


@pytest.mark.parametrize("separator", [(), (("text", True, "b"),)], ids=["next", "later"])
@pytest.mark.parametrize(
    ("first", "last", "want"),
    [
        (("either", True, "old"), ("either", True, "new"), '"new"'),
        (("either", False, "1"), ("either", True, "new" * 50), f'"{"new" * 50}"'),
        (("either", False, "1"), ("either", False, "2"), "2"),
        # What was sent stays.
        (("either", True, "old" * 50), ("either", True, "new"), f'"{"old" * 50}"'),
        (("either", True, "old" * 50), ("either", False, "2"), f'"{"old" * 50}"'),
    ],
)
def test_last_of_a_repeated_parameter_wins_unless_the_first_was_sent(
    first: Any, last: Any, want: str, separator: Any
) -> None:
    assert parse_arguments(write(first, *separator, last))["either"] == json.loads(want)


@pytest.mark.parametrize("name", ["arguments", "input"])
@pytest.mark.parametrize("is_string", [True, False], ids=["string", "object"])
def test_only_parameter_that_wraps_all_is_unwrapped(name: str, is_string: bool) -> None:
    assert write((name, is_string, '{"count": "3", "text": "a"}')) == '{"count": 3, "text": "a"}'
    assert write((name, is_string, "{}")) == "{}"


@pytest.mark.parametrize(
    ("parameters", "schema"),
    [
        ([("arguments", False, '{"unknown": 1}')], SCHEMA),
        ([("arguments", False, "[1]")], SCHEMA),
        ([("arguments", True, "ls" * 50)], SCHEMA),
        ([("arguments", False, "{}"), ("text", True, "a")], SCHEMA),
        ([("wrapped", False, '{"text": "a"}')], SCHEMA),
        ([("input", False, '{"text": "a"}')], None),
        ([("input", False, '{"input": 1}')], {"properties": {"input": {}}}),
    ],
    ids=["unknown key", "list", "no JSON", "not alone", "another name", "no schema", "declared"],
)
def test_other_parameters_are_not_unwrapped(parameters: Any, schema: Any) -> None:
    assert set(parse_arguments(write(*parameters, schema=schema))) == {p[0] for p in parameters}


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ('\n{"count": "3", "x": 1.10}\n', '{"count": 3, "x": 1.10}'),
        ('{"x": 1, "x": 2}', '{"x": 2}'),
        ("[1]", "{}"),
        ('{"x": ', "{}"),
        ("\n\n", "{}"),
    ],
)
def test_body_that_is_a_json_object_is_the_arguments(body: str, want: str) -> None:
    writer = ArgumentsWriter(SCHEMA, coerces=True)
    assert "".join(writer.push(character) for character in body) + writer.finish() == want


@pytest.mark.parametrize("value", ["a", "long " * 50 + "a"], ids=["short", "long"])
def test_newlines_before_a_closing_tag_are_kept_and_before_another_tag_dropped(value: str) -> None:
    closed = write(("text", True, f"{value}\n\n"))
    assert parse_arguments(closed) == {"text": f"{value}\n\n"}
    writer = ArgumentsWriter(SCHEMA, coerces=True)
    text = writer.open("text", is_string=True) + writer.push(f"{value}\n\n")
    text += writer.open("either", is_string=True) + writer.push("b\n") + writer.finish()
    assert parse_arguments(text) == {"text": value, "either": "b"}


def test_text_between_parameters_is_dropped() -> None:
    writer = ArgumentsWriter(None, coerces=True)
    text = writer.open("a", is_string=True) + writer.push("1") + writer.close()
    assert text + writer.push('{"b": 2}') + writer.finish() == '{"a": "1"}'


def test_c25_cut_call_shows_what_is_known_and_stays_open() -> None:
    writer = ArgumentsWriter(SCHEMA, coerces=True)
    text = writer.open("count", is_string=False) + writer.push("3")
    text += writer.open("text", is_string=True) + writer.push('say "hi')
    assert text + writer.cut() == '{"count": 3, "text": "say \\"hi'
    undecided = ArgumentsWriter(SCHEMA, coerces=True)
    undecided.open("items", is_string=True)
    undecided.push("[1, ")
    assert undecided.cut() == ""


VALUES = st.one_of(
    st.text(max_size=90), st.sampled_from(["3", "true", '{"text": "a"}', '"3"', "NaN", "x" * 70])
)
NAMES = st.sampled_from([*SCHEMA["properties"], "arguments", "input", 'odd "name"'])


@given(
    parameters=st.lists(st.tuples(NAMES, st.booleans(), VALUES), max_size=6),
    body=VALUES,
    size=st.integers(1, 20),
)
def test_c22_any_parameters_give_one_object_for_any_cut(
    parameters: list[tuple[str, bool, str]], body: str, size: int
) -> None:
    def run(pieces_of: Any) -> str:
        writer = ArgumentsWriter(SCHEMA, coerces=True)
        text = "".join(writer.push(piece) for piece in pieces_of(body))
        for name, is_string, value in parameters:
            text += writer.open(name, is_string=is_string)
            text += "".join(writer.push(piece) for piece in pieces_of(value))
        return text + writer.finish()

    whole = run(lambda value: [value])
    cut = run(lambda value: [value[i : i + size] for i in range(0, len(value), size)])
    assert parse_arguments(cut) == parse_arguments(whole)
