"""Limits of schemas, and schemas whose objects are closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leadline.core.errors import BadRequest
from leadline.core.request import StructuredOutputs
from leadline.text.grammar import content_constraint
from leadline.text.json_schema import MAX_BYTES, MAX_DEPTH, check_schema, close_schema, load_schema
from leadline.text.tokenizer import Tokenizer
from tests.text.grammars import Grammars


def wrap_object(schema: Any) -> Any:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def wrap_array(schema: Any) -> Any:
    return {"type": "array", "items": schema}


def wrap_union(schema: Any) -> Any:
    return {"anyOf": [schema, {"type": "null"}]}


def nested(wrap: Callable[[Any], Any], levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels - 1):
        schema = wrap(schema)
    return schema


WRAPS = pytest.mark.parametrize("wrap", [wrap_object, wrap_array, wrap_union])


@WRAPS
def test_deepest_nesting_compiles(tokenizer: Tokenizer, wrap: Callable[[Any], Any]) -> None:
    grammar = content_constraint(StructuredOutputs(json=nested(wrap, MAX_DEPTH)))
    assert grammar is not None
    assert not Grammars(tokenizer).error(grammar)


@WRAPS
@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 100, 5_000])
def test_c43_deeper_nesting_is_refused(wrap: Callable[[Any], Any], levels: int) -> None:
    with pytest.raises(BadRequest, match="64 levels") as error:
        check_schema(nested(wrap, levels), param="schema")
    assert (error.value.param, error.value.code) == ("schema", "invalid_schema")


def test_c43_nesting_of_data_counts_too() -> None:
    value: Any = 1
    for _ in range(100):
        value = [value]
    with pytest.raises(BadRequest, match="64 levels"):
        check_schema({"const": value}, param="schema")


def test_c43_two_megabytes_are_refused() -> None:
    schema = {"enum": ["x" * MAX_BYTES, "x" * MAX_BYTES]}
    with pytest.raises(BadRequest, match="bytes"):
        check_schema(schema, param="schema")


@pytest.mark.parametrize("given", [True, {"type": "integer"}, '{"type": "integer"}', "true"])
def test_schema_comes_as_an_object_its_text_or_a_boolean(given: Any) -> None:
    assert load_schema(given, param="schema") in (True, {"type": "integer"})


@pytest.mark.parametrize("given", ["", "{", "3", "null", '"{}"', 3, None, []], ids=repr)
def test_c43_other_values_are_no_schema(given: Any) -> None:
    with pytest.raises(BadRequest) as error:
        load_schema(given, param="schema")
    assert (error.value.param, error.value.code) == ("schema", "invalid_schema")


def test_c8_closed_objects_hold_exactly_their_properties() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "object", "properties": {"b": {}}}},
            "c": {"anyOf": [{"$ref": "#/$defs/d"}, {"enum": [{"properties": "data"}]}]},
        },
        "required": ["a"],
        "additionalProperties": True,
        "$defs": {"d": {"type": "object"}},
    }
    closed = close_schema(schema)
    assert (closed["required"], closed["additionalProperties"]) == (["a", "c"], False)
    items = closed["properties"]["a"]["items"]
    assert (items["required"], items["additionalProperties"]) == (["b"], False)
    assert closed["$defs"]["d"] == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
        "required": [],
    }
    assert closed["properties"]["c"] == schema["properties"]["c"]  # type: ignore[index]
    assert schema["required"] == ["a"]
