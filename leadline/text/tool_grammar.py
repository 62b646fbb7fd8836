"""Grammar of a tool block: markers and names always, arguments where a tool asks (5.2, C28, C29).

The DSML marker is one token, so a block consists of ordinary text between marker tokens. Free
text can never hold a marker, provided that the matcher's tokenizer holds every added token for
special: most are not flagged so in ``tokenizer.json`` (serving-api 1.1).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from leadline.text.chat import Tool
from leadline.text.json_schema import (
    MAX_BYTES,
    Schema,
    Text,
    check_schema,
    close_schema,
    invalid,
    joint_keywords,
    json_rule,
    property_names,
    value_forms,
)
from leadline.text.profiles import DsmlTags

# Of all rules for the values of strict tools: references repeat parts of a schema.
MAX_RULE_BYTES = 4 * MAX_BYTES
# Of parameter names; what lies beyond stays free, for a lexer takes no more than about twice that.
MAX_NAME_BYTES = MAX_BYTES


class ToolBlock:
    """Lark grammars that end with a tool block, for the places where one can begin.

    Args:
        tools: those that may be called, at least one, by their place in the request.
        marker_id: of the DSML marker.
        one_call: the block closes after the first call.
        strict_arguments: arguments of every tool are constrained, as far as schemas allow.

    Raises:
        BadRequest: the schema of a strict tool cannot be enforced; it names the keyword.
    """

    def __init__(
        self,
        tools: Mapping[int, Tool],
        *,
        marker_id: int,
        tags: DsmlTags,
        one_call: bool = False,
        strict_arguments: bool = False,
    ) -> None:
        marker = f"<[{marker_id}]>"
        self._head = _literal(f"{tags.calls}>\n")
        self._blank_line = f'"\\n\\n<" {marker}'
        rules = _CallRules(marker, tags)
        calls = [rules.add_call(i, tool, strict_arguments) for i, tool in tools.items()]
        self._rules = [
            f"calls: call{'' if one_call else '+'} {_literal('</')} {marker} "
            + _literal(f"{tags.calls}>"),
            f'call: "<" {marker} ({" | ".join(calls)})',
            *rules.lines,
        ]

    def inside(self) -> str:
        """Where the prompt opened the block."""
        return self._grammar("calls")

    def behind_marker(self) -> str:
        """Where the model just wrote the first DSML marker."""
        return self._grammar(f"{self._head} calls")

    def whole(self) -> str:
        """Where nothing but a block may come."""
        return self._grammar(f"{self._blank_line} {self._head} calls")

    def whole_or(self, content: str) -> str:
        """Where a block may come, or an answer of the given grammar instead."""
        block = f"{self._blank_line} {self._head} calls"
        return self._grammar(f"{block} | answer", f"answer: %lark {{\n{content}\n}}")

    def _grammar(self, start: str, *rules: str) -> str:
        return "\n".join([f"start: {start}", *rules, *self._rules])


class _CallRules:
    """Writes the rules of single calls; ``lines`` collects them."""

    def __init__(self, marker: str, tags: DsmlTags) -> None:
        self._tags = tags
        self._end_call = f'"</" {marker} ' + _literal(f"{tags.invoke}>\n")
        self._open = f'"<" {marker}'
        self.lines: list[str] = []
        self._names: dict[str, str] = {}
        self._num_rule_bytes = 0
        self._num_name_bytes = 0
        text = self._define("TEXT", _text_body(Text()))
        any_json = self._define("any_json", json_rule(True))
        self.lines += [
            f'value: "true\\">" {text} end_value | "false\\">" {any_json} "</" end_value',
            f"end_value: {marker} " + _literal(f"{tags.parameter}>\n"),
        ]

    def add_call(self, index: int, tool: Tool, strict_arguments: bool) -> str:
        """The name of a new rule for everything of a call behind its first marker."""
        where = f"tools[{index}]"
        schema = tool.parameters or {}
        if tool.strict or strict_arguments:
            check_schema(schema, param=where)
        if tool.strict:
            schema = close_schema({"type": "object", **schema})
            if keywords := joint_keywords(schema):
                raise invalid(
                    f"{where}: {keywords[0]!r} beside the properties of the strict tool "
                    f"{tool.name!r} cannot be enforced; leave it out, or strict",
                    where,
                )
        names = property_names(schema)
        name = f"call_{index}"
        if names and (tool.strict or strict_arguments):
            parameters = self._schema_parameters(name, schema, lenient=not tool.strict)
        else:
            parameters = self._any_parameters(name, names)
        head = _literal(f'{self._tags.invoke} name="{tool.name}">\n')
        self.lines.append(f"{name}: {head} ({parameters}) {self._end_call}")
        return name

    def _any_parameters(self, call: str, names: tuple[str, ...] | None) -> str:
        """Parameters in any order; with none of them the call may hold an empty line (2.6)."""
        if names == ():
            return '"\\n"?'
        self._num_name_bytes += sum(map(len, names or ()))
        if self._num_name_bytes > MAX_NAME_BYTES:
            names = None
        start, end = _literal(f'{self._tags.parameter} name="'), _literal('" string="')
        name = r"/[^\"\n]+/" if names is None else " | ".join(map(_literal, names))
        terminal = call.upper()
        self.lines += [
            f"{terminal}: {start} ({name}) {end}",
            f"{call}_any: {self._open} {terminal} value",
        ]
        return f'{call}_any+ | "\\n"?'

    def _schema_parameters(self, call: str, schema: Mapping[str, Any], *, lenient: bool) -> str:
        """Parameters in the order of the schema, their values as it says."""
        listed = schema.get("required")
        required = set(map(str, listed)) if isinstance(listed, list) else set()
        sequence: list[str] = []
        for i, (name, part) in enumerate(schema["properties"].items()):
            rule = f"{call}_{i}"
            head = _literal(f'{self._tags.parameter} name="{name}" string="')
            forms = value_forms(part, schema)
            values = self._values(rule, forms, lenient=lenient)
            self.lines.append(f"{rule}: {self._open} {head} ({values}) end_value")
            sequence.append(rule if name in required else f"{rule}?")
        parameters = " ".join(sequence)
        return parameters if required else f'{parameters} | "\\n"'

    def _values(self, rule: str, forms: Iterable[Text | Schema], *, lenient: bool) -> str:
        options: list[str] = []
        for i, form in enumerate(forms):
            if isinstance(form, Text):
                text = self._define(f"{rule.upper()}_{i}", _text_body(form))
                options.append(f'"true\\">" {text}')
            else:
                value = self._define(f"{rule}_json_{i}", json_rule(form, lenient=lenient))
                options.append(f'"false\\">" {value} "</"')
        return " | ".join(options)

    def _define(self, name: str, body: str) -> str:
        """The name of a rule with this body: an earlier one, so that grammars stay small."""
        self._num_rule_bytes += len(body)
        if self._num_rule_bytes > MAX_RULE_BYTES:
            raise invalid("the schemas of strict tools are too large together", "tools")
        if body not in self._names:
            self._names[body] = name
            self.lines.append(f"{name}: {body}")
        return self._names[body]


def _text_body(text: Text) -> str:
    if text.choices is not None:
        return f'({" | ".join(map(_literal, text.choices))}) "</"'
    longest = "" if text.max_length is None else text.max_length
    return rf"/(?s:.{{{text.min_length},{longest}}})<\//"


def _literal(text: str) -> str:
    """A string of Lark's notation, which is JSON's."""
    return json.dumps(text)
