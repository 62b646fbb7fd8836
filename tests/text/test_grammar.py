"""What holds for which token of an answer, and what the forms of content let through."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from leadline.core.errors import BadRequest
from leadline.core.request import Constraint, SamplingParams, StructuredOutputs, ThinkingBudget
from leadline.text.chat import AnswerStart, ChatPrompt, Tool, ToolChoice
from leadline.text.grammar import (
    bad_token_ids,
    chat_constraint,
    content_constraint,
    thinking_budget,
)
from leadline.text.profiles import V4_TAGS, V41_TAGS
from leadline.text.tokenizer import Tokenizer
from tests.text.grammars import DSML, Grammars

READ = Tool("read", parameters={"properties": {"path": {"type": "string"}}})
WRITE = Tool("write", parameters={"properties": {"path": {"type": "string"}}})
POINT: Any = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
AS_POINT = StructuredOutputs(json=POINT)
THINKING = AnswerStart.REASONING
CHAT = AnswerStart.CONTENT


@pytest.fixture(scope="module")
def tiny(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def prompt(start: AnswerStart, *tools: Tool, choice: ToolChoice | None = None) -> ChatPrompt:
    thinking = start in (AnswerStart.REASONING, AnswerStart.REASONING_CONTINUED)
    return ChatPrompt((0,), start, thinking, tools=tools, tool_choice=choice or ToolChoice())


def constraint(
    tiny: Grammars,
    start: AnswerStart,
    *tools: Tool,
    choice: ToolChoice | None = None,
    structured: StructuredOutputs | None = None,
    **options: Any,
) -> Constraint | None:
    chat = prompt(start, *tools, choice=choice)
    return chat_constraint(chat, tiny.tokenizer, structured, **({"tags": V41_TAGS} | options))


def after(found: Constraint | None, trigger: int) -> str:
    assert found is not None
    assert found.at_once is None
    return dict(found.after)[trigger]


def at_once(found: Constraint | None) -> str:
    assert found is not None
    assert found.at_once is not None
    assert not found.after
    return found.at_once


def call(name: str, path: str = "a.py") -> str:
    return (
        f'<{DSML} invoke name="{name}">\n<{DSML} parameter name="path" string="true">{path}'
        f"</{DSML} parameter>\n</{DSML} invoke>\n"
    )


def block(*names: str) -> str:
    return f" calls>\n{''.join(map(call, names))}</{DSML} calls>"


def dumps(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def test_a_plain_chat_is_not_constrained(tiny: Grammars) -> None:
    for start in AnswerStart:
        if start is not AnswerStart.TOOL_BLOCK:
            assert constraint(tiny, start) is None


@pytest.mark.parametrize("start", [THINKING, AnswerStart.REASONING_CONTINUED], ids=str)
def test_r4_c42_with_thinking_the_form_begins_behind_the_end_of_reasoning(
    tiny: Grammars, start: AnswerStart
) -> None:
    found = constraint(tiny, start, structured=AS_POINT)
    think_end = tiny.tokenizer.marker_id("</think>")
    assert found is not None
    assert [trigger for trigger, _ in found.after] == [think_end]
    assert tiny.accepts(after(found, think_end), '{"x": 1}')


@pytest.mark.parametrize("start", [CHAT, AnswerStart.CONTENT_CONTINUED, AnswerStart.PLAIN], ids=str)
def test_without_thinking_the_form_holds_at_once(tiny: Grammars, start: AnswerStart) -> None:
    assert tiny.accepts(at_once(constraint(tiny, start, structured=AS_POINT)), '{"x": 1}')


@pytest.mark.parametrize("start", [THINKING, CHAT], ids=str)
def test_c28_before_the_block_nothing_is_masked(tiny: Grammars, start: AnswerStart) -> None:
    found = constraint(tiny, start, READ)
    assert found is not None
    assert found.at_once is None
    assert [trigger for trigger, _ in found.after] == [tiny.dsml]
    assert tiny.accepts(after(found, tiny.dsml), block("read"))
    assert not tiny.allows(after(found, tiny.dsml), block("write"))


def test_item_77_tool_choice_none_constrains_no_call(tiny: Grammars) -> None:
    assert constraint(tiny, CHAT, choice=ToolChoice("none")) is None


def test_item_78_parallel_off_allows_one_call(tiny: Grammars) -> None:
    found = constraint(tiny, CHAT, READ, choice=ToolChoice(parallel=False))
    assert tiny.accepts(after(found, tiny.dsml), block("read"))
    assert not tiny.allows(after(found, tiny.dsml), block("read", "read"))


@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("named", "read")], ids=str)
def test_c29_demanded_call_goes_on_in_the_block_that_the_prompt_opened(
    tiny: Grammars, choice: ToolChoice
) -> None:
    grammar = at_once(constraint(tiny, AnswerStart.TOOL_BLOCK, READ, WRITE, choice=choice))
    assert tiny.accepts(grammar, call("read") + f"</{DSML} calls>")
    assert not tiny.allows(grammar, f"</{DSML}")


@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("named", "read")], ids=str)
def test_c29_r5_demanded_call_follows_free_reasoning(tiny: Grammars, choice: ToolChoice) -> None:
    found = constraint(tiny, THINKING, READ, WRITE, choice=choice)
    grammar = after(found, tiny.tokenizer.marker_id("</think>"))
    assert tiny.accepts(grammar, f"\n\n<{DSML}{block('read')}")
    assert not tiny.allows(grammar, "Hello")
    assert not tiny.allows(grammar, "\n\n\n")
    # A call in reasoning that was not closed is a call too.
    assert tiny.accepts(after(found, tiny.dsml), block("read"))


def test_required_takes_several_calls_and_named_one_of_its_name(tiny: Grammars) -> None:
    required = at_once(
        constraint(tiny, AnswerStart.TOOL_BLOCK, READ, WRITE, choice=ToolChoice("required"))
    )
    named = at_once(
        constraint(tiny, AnswerStart.TOOL_BLOCK, READ, WRITE, choice=ToolChoice("named", "write"))
    )
    end = f"</{DSML} calls>"
    assert tiny.accepts(required, call("read") + call("write") + end)
    assert tiny.accepts(named, call("write") + end)
    assert not tiny.allows(named, call("read"))
    assert not tiny.allows(named, call("write") + call("write"))


def test_only_allowed_tools_may_be_called(tiny: Grammars) -> None:
    found = constraint(tiny, CHAT, READ, WRITE, choice=ToolChoice(allowed=("write",)))
    assert tiny.accepts(after(found, tiny.dsml), block("write"))
    assert not tiny.allows(after(found, tiny.dsml), block("read"))
    nothing = constraint(tiny, CHAT, READ, choice=ToolChoice(allowed=()))
    assert nothing is None


def test_errors_of_allowed_tools_name_their_place_in_the_request(tiny: Grammars) -> None:
    bad = Tool("bad", parameters={"anyOf": []}, strict=True)
    with pytest.raises(BadRequest) as error:
        constraint(tiny, CHAT, READ, bad, choice=ToolChoice("named", "bad"))
    assert error.value.param == "tools[1]"


@pytest.mark.parametrize("start", [THINKING, CHAT], ids=str)
def test_with_tools_and_a_form_the_answer_is_either(tiny: Grammars, start: AnswerStart) -> None:
    found = constraint(tiny, start, READ, structured=AS_POINT)
    assert found is not None
    if start is THINKING:
        grammar = after(found, tiny.tokenizer.marker_id("</think>"))
        assert tiny.accepts(after(found, tiny.dsml), block("read"))
    else:
        grammar = at_once(found)
    for text in ('{"x": 1}', '\n{"x":1,"y":2}', f"\n\n<{DSML}{block('read')}"):
        assert tiny.accepts(grammar, text)
    for text in ("Hello", "\n\n{", f"\n\n<{DSML}{block('write')}", f"{{<{DSML}"):
        assert not tiny.allows(grammar, text)


@pytest.mark.parametrize(
    ("structured", "text"),
    [
        (StructuredOutputs(regex="[a-z]+}"), "abc}"),
        (StructuredOutputs(choice=("yes", "{")), "{"),
        (StructuredOutputs(grammar='start: "a" B\nB: /b+/'), "abb"),
        (StructuredOutputs(grammar='root ::= "a" b*\nb ::= "b"'), "abb"),
        (StructuredOutputs(json_object=True), '{"a": 1}'),
        (
            StructuredOutputs(
                structural_tag={
                    "triggers": ["<f"],
                    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
                }
            ),
            "see <f>3</f>",
        ),
    ],
    ids=["regex", "choice", "lark", "gbnf", "json_object", "structural_tag"],
)
def test_every_form_goes_together_with_tools(
    tiny: Grammars, structured: StructuredOutputs, text: str
) -> None:
    grammar = at_once(constraint(tiny, CHAT, READ, structured=structured))
    assert tiny.accepts(grammar, text)
    assert tiny.accepts(grammar, f"\n\n<{DSML}{block('read')}")
    assert not tiny.allows(grammar, f"\n\n<{DSML}{block('write')}")


def test_a_demanded_call_takes_the_place_of_a_form(tiny: Grammars) -> None:
    found = constraint(
        tiny, AnswerStart.TOOL_BLOCK, READ, choice=ToolChoice("required"), structured=AS_POINT
    )
    assert tiny.accepts(at_once(found), call("read") + f"</{DSML} calls>")


def test_quick_instructions_have_no_calls(tiny: Grammars) -> None:
    assert constraint(tiny, AnswerStart.PLAIN, READ) is None


def test_strict_level_parameter_constrains_arguments_of_every_tool(tiny: Grammars) -> None:
    tool = Tool("read", parameters={"properties": {"path": {"enum": ["a.py"]}}})
    for level, allowed in (("auto", True), ("function", True), ("parameter", False)):
        grammar = after(constraint(tiny, CHAT, tool, strict_level=level), tiny.dsml)
        assert tiny.accepts(grammar, block("read"))
        assert tiny.allows(grammar, f" calls>\n{call('read', 'b.py')}") is allowed


def test_v4_tags_have_no_space(tiny: Grammars) -> None:
    grammar = after(constraint(tiny, CHAT, READ, tags=V4_TAGS), tiny.dsml)
    assert tiny.allows(grammar, f'tool_calls>\n<{DSML}invoke name="read">\n')
    assert not tiny.allows(grammar, " calls")


JSON_SCHEMAS = [
    ({"type": "string", "enum": ["a", "b"]}, ["a", "b"], ["c", 1]),
    ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["x", True]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "x"], [None]),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, [3, 40], [2, "x"]),
    (
        {"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#"}}}},
        [[], [[], [[]]]],
        [1, [1]],
    ),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1], [1, 2]],
     [[], [1, 2, 3]]),
    ({"type": "array", "prefixItems": [{"type": "string"}], "items": False}, [["x"]], [[1]]),
    ({"type": "string", "pattern": "^[A-Z]{2}-\\d+$"}, ["AB-12"], ["ab-12", "AB-"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd"]),
    ({"type": "integer", "minimum": -5, "exclusiveMaximum": 10}, [-5, 9], [-6, 10]),
    ({"type": "number", "multipleOf": 0.5}, [1.5, 2], [1.25]),
    ({"type": "string", "format": "date-time"}, ["2024-02-29T12:00:00Z"], ["yesterday"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["127.0.0.256"]),
    (POINT, [{"x": 1}, {"x": 1, "y": 2}], [{}, {"y": 2}, {"x": 1, "z": 3}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1}],
     [{"a": "x"}]),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}},
      "additionalProperties": False}, [{"ab": 1}], [{"b": 1}, {"ab": "x"}]),
    ({"type": ["integer", "null"]}, [1, None], ["x"]),
    (True, [1, "x", [None]], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), JSON_SCHEMAS, ids=str)
def test_json_schema_takes_its_values_and_no_others(
    tiny: Grammars, schema: Any, good: list[Any], bad: list[Any]
) -> None:
    for given in (schema, json.dumps(schema)):
        grammar = content_constraint(StructuredOutputs(json=given))
        assert grammar is not None
        for value in good:
            assert tiny.accepts(grammar, dumps(value))
            assert tiny.accepts(grammar, dumps(value, separators=(",", ":")))
            assert tiny.accepts(grammar, "\n" + dumps(value, indent=2))
        for value in bad:
            assert not tiny.accepts(grammar, json.dumps(value))


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"not": {"type": "integer"}}, "not"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "string", "format": "ticket"}, "ticket"),
        ({"type": "text"}, "text"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "https://example.com/schema"}, "does not fetch"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        (False, "false"),
    ],
    ids=str,
)
def test_c43_unsupported_schema_is_named_by_the_compiler(
    tiny: Grammars, schema: Any, word: str
) -> None:
    grammar = content_constraint(StructuredOutputs(json=schema))
    assert grammar is not None
    assert word in tiny.error(grammar)


@pytest.mark.parametrize("text", ["\n\n{", "{  ", "{\n\n", "{\t", " {", '{"x":  ', '{"x": 1}\n'])
def test_whitespace_of_json_is_bounded(tiny: Grammars, text: str) -> None:
    grammar = content_constraint(AS_POINT)
    assert grammar is not None
    assert not tiny.allows(grammar, text)


def test_whitespace_options_of_clients_do_not_count(tiny: Grammars) -> None:
    wide = {**POINT, "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    grammar = content_constraint(StructuredOutputs(json=wide))
    assert grammar is not None
    assert not tiny.allows(grammar, "{   ")


def test_c14_json_object_is_an_object(tiny: Grammars) -> None:
    grammar = content_constraint(StructuredOutputs(json_object=True))
    assert grammar is not None
    assert tiny.accepts(grammar, '{"a": [1, {"b": null}]}')
    assert not tiny.allows(grammar, "[")


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("[a-c]+", "abc", "abx"),
        ("^a$", "a", "aa"),
        ("a/b#c//d", "a/b#c//d", "b"),
        (r"\d{3}-\w+", "123-ä", "12"),
        ("a\nb", "a\nb", "ab"),
        ("", "", "x"),
        ("naïve|你好", "你好", "hi"),
    ],
)
def test_regex_matches_the_whole_content(tiny: Grammars, pattern: str, good: str, bad: str) -> None:
    grammar = content_constraint(StructuredOutputs(regex=pattern))
    assert grammar is not None
    assert tiny.accepts(grammar, good)
    assert not tiny.accepts(grammar, bad)


def test_choice_is_one_of_its_texts(tiny: Grammars) -> None:
    texts = ("yes", "yes!", 'say "no"', "é😀\n", "a/b")
    grammar = content_constraint(StructuredOutputs(choice=texts))
    assert grammar is not None
    for text in texts:
        assert tiny.accepts(grammar, text)
    assert not tiny.accepts(grammar, "ye")
    assert not tiny.allows(grammar, "yes?")


def test_thousands_of_choices_stay_within_the_parser_limits(tiny: Grammars) -> None:
    grammar = content_constraint(StructuredOutputs(choice=tuple(map(str, range(10_000)))))
    assert grammar is not None
    assert tiny.accepts(grammar, "9876")
    assert tiny.allowed(tiny.behind(grammar, "98"))


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutputs(regex="("),
        StructuredOutputs(regex="(?<=a)b"),
        StructuredOutputs(grammar="start: missing"),
        StructuredOutputs(grammar="nothing at all"),
    ],
    ids=str,
)
def test_c43_bad_regex_and_grammar_are_errors_of_the_compiler(
    tiny: Grammars, structured: StructuredOutputs
) -> None:
    grammar = content_constraint(structured)
    assert grammar is not None
    assert tiny.error(grammar)


@pytest.mark.parametrize(
    ("structured", "param"),
    [
        (StructuredOutputs(json="{bad"), "json"),
        (StructuredOutputs(json="[1]"), "json"),
        (StructuredOutputs(json='"' + "x" * 2**21 + '"'), "json"),
        (StructuredOutputs(json="[" * 100_000), "json"),
        (StructuredOutputs(json={"enum": ["x" * 2**21]}), "json"),
        (StructuredOutputs(regex="x" * 2**21), "regex"),
        (StructuredOutputs(choice=()), "choice"),
        (StructuredOutputs(choice=("x" * 2**21,)), "choice"),
        (StructuredOutputs(grammar='root ::= "a" missing'), "grammar"),
        (StructuredOutputs(grammar='root ::= "a'), "grammar"),
        (StructuredOutputs(grammar="x" * 2**21), "grammar"),
        (StructuredOutputs(grammar='root ::= "x"\n' * 10_000), "grammar"),
        (StructuredOutputs(grammar="root ::= " + "(" * 10_000), "grammar"),
        (StructuredOutputs(structural_tag="{"), "structural_tag"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_c43_what_can_be_no_grammar_is_refused(structured: StructuredOutputs, param: str) -> None:
    with pytest.raises(BadRequest) as error:
        content_constraint(structured)
    assert error.value.param == f"structured_outputs.{param}"
    assert error.value.code == "invalid_schema"
    assert len(str(error.value)) < 500


def test_c42_random_walks_under_the_mask_are_json_that_parses(tiny: Grammars) -> None:
    schema: Any = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["a", "b", None]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,8}$"}},
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "required": ["name", "kind", "next"],
        "additionalProperties": False,
    }
    grammar = at_once(constraint(tiny, CHAT, READ, structured=StructuredOutputs(json=schema)))
    rng = random.Random(7)
    walks = [tiny.walk(grammar, rng, ['"', "]", "}", "n", "<", "/"]) for _ in range(200)]
    ended = [text for text in walks if text is not None]
    assert len(ended) > 150
    answers = [text for text in ended if DSML not in text]
    assert len(answers) > 50
    for text in answers:
        value = json.loads(text)
        assert {"name", "kind", "next"} <= value.keys() <= set(schema["properties"])
        assert len(value["name"]) <= 20
        assert 0 <= value.get("size", 0) <= 99


def test_bad_words_are_stopped_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    sequences = bad_token_ids(("hello", " the"), tokenizer)
    for text in ("hello", " hello", " the"):
        ids = tuple(tokenizer.encode(text))
        assert any(ids[-len(sequence) :] == sequence for sequence in sequences)
    assert len(set(sequences)) == len(sequences)
    assert bad_token_ids((), tokenizer) == ()


def test_empty_bad_word_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest) as error:
        bad_token_ids(("x", ""), tokenizer)
    assert error.value.param == "bad_words[1]"


@pytest.mark.parametrize(
    ("start", "tokens", "limited"),
    [
        (THINKING, 50, True),
        (AnswerStart.REASONING_CONTINUED, 0, True),
        (THINKING, -1, False),
        (CHAT, 50, False),
    ],
    ids=str,
)
def test_item_69_thinking_budget_holds_where_reasoning_is_open(
    tokenizer: Tokenizer, start: AnswerStart, tokens: int, limited: bool
) -> None:
    sampling = SamplingParams(thinking_token_budget=tokens)
    end_id = tokenizer.marker_id("</think>")
    wanted = ThinkingBudget(tokens, end_id) if limited else None
    assert thinking_budget(sampling, prompt(start), tokenizer) == wanted
