"""Structural tags: texts that begin and end a constrained part of an otherwise free content.

Both spellings that vLLM's clients use are understood: ``structures`` with ``triggers``, and the
tree of ``format`` objects that replaced it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from reprlib import repr as brief
from typing import Any

from llguidance import regex_to_lark

from leadline.text.json_schema import check_size, invalid, json_rule, load_json, load_schema

MAX_DEPTH = 16


def structural_tag_grammar(given: Mapping[str, Any] | str, *, param: str) -> str:
    """Lark grammar of a structural tag (serving-api 9.4).

    Raises:
        BadRequest: a form that is unknown or lacks a field; ``param`` is its path.
    """
    tag = load_json(given, param=param) if isinstance(given, str) else given
    if not isinstance(tag, Mapping):
        raise invalid(f"{param} is {brief(tag)}; it must be an object", param)
    writer = _Writer()
    if "structures" in tag:
        structures = _field(tag, "structures", list, param)
        tags = [
            _old_structure(part, f"{param}.structures[{i}]") for i, part in enumerate(structures)
        ]
        form: Any = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
        start = writer.write(form, param)
    else:
        start = writer.write(_field(tag, "format", Mapping, param), f"{param}.format")
    return "\n".join([f"start: {start}", *writer.lines])


def _old_structure(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise invalid(f"{where} is {brief(part)}; it must be an object", where)
    content = {"type": "json_schema", "json_schema": part.get("schema", True)}
    return {"type": "tag", **part, "content": content}


class _Writer:
    """Writes one rule for each form; ``lines`` collects them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 0

    def write(self, form: Any, where: str) -> str:
        """The name of the rule of a form."""
        kind = form.get("type") if isinstance(form, Mapping) else None
        writers = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }
        if not isinstance(kind, str) or kind not in writers:
            raise invalid(
                f"{where}.type is {brief(kind)}; choose one of {', '.join(writers)}",
                f"{where}.type",
            )
        if self._depth == MAX_DEPTH:
            raise invalid(f"{where} is nested more than {MAX_DEPTH} levels deep", where)
        self._depth += 1
        rule = self._add(writers[kind](form, where))
        self._depth -= 1
        return rule

    def _add(self, body: str, *, options: str = "") -> str:
        rule = f"form_{len(self.lines)}"
        self.lines.append(f"{rule}{options}: {body}")
        return rule

    def _const_string(self, form: Mapping[str, Any], where: str) -> str:
        return json.dumps(_field(form, "value", str, where))

    def _json_schema(self, form: Mapping[str, Any], where: str) -> str:
        schema = _field(form, "json_schema", (Mapping, bool, str), where)
        return json_rule(load_schema(schema, param=f"{where}.json_schema"))

    def _regex(self, form: Mapping[str, Any], where: str) -> str:
        pattern = _field(form, "pattern", str, where)
        check_size(pattern, param=f"{where}.pattern")
        return f"/{regex_to_lark(pattern)}/"

    def _any_text(self, form: Mapping[str, Any], where: str) -> str:
        return "/(?s:.*)/"

    def _sequence(self, form: Mapping[str, Any], where: str) -> str:
        return " ".join(self._elements(form, "elements", where))

    def _or(self, form: Mapping[str, Any], where: str) -> str:
        return " | ".join(self._elements(form, "elements", where))

    def _tag(self, form: Mapping[str, Any], where: str, *, written: str = "") -> str:
        """A tag, of whose beginning ``written`` stands there already."""
        begin = _field(form, "begin", str, where).removeprefix(written)
        end = _field(form, "end", str, where)
        content = _field(form, "content", Mapping, where)
        if content.get("type") == "any_text" and end:
            # Lazy, so that the text goes to the first end and not to the last one.
            inner = self._add(f"/(?s:.*)/ {json.dumps(end)}", options="[lazy]")
            return f"{json.dumps(begin)} {inner}"
        inner = self.write(content, f"{where}.content")
        return f"{json.dumps(begin)} {inner} {json.dumps(end)}"

    def _triggered_tags(self, form: Mapping[str, Any], where: str) -> str:
        """Free text, until a trigger appears: then one of its tags."""
        triggers = _field(form, "triggers", list, where)
        by_trigger: dict[str, list[str]] = {}
        for i, tag in enumerate(_field(form, "tags", list, where)):
            path = f"{where}.tags[{i}]"
            begin = _field(tag, "begin", str, path)
            trigger = next((t for t in triggers if isinstance(t, str) and begin.startswith(t)), "")
            if not trigger:
                raise invalid(f"{path}.begin is {brief(begin)}, which starts with no trigger", path)
            rule = self._add(self._tag(tag, path, written=trigger))
            by_trigger.setdefault(trigger, []).append(rule)
        parts: list[str] = []
        for trigger, rules in by_trigger.items():
            text = self._add(f"/(?s:.*)/ {json.dumps(trigger)}", options="[lazy]")
            parts.append(f"{text} ({' | '.join(rules)})")
        if not parts:
            raise invalid(f"{where} has no tags", where)
        count = "+" if form.get("at_least_one") else "*"
        if form.get("stop_after_first"):
            count = "" if form.get("at_least_one") else "?"
        rest = "" if form.get("stop_after_first") and form.get("at_least_one") else " /(?s:.*)/"
        return f"({' | '.join(parts)}){count}{rest}"

    def _tags_with_separator(self, form: Mapping[str, Any], where: str) -> str:
        tags = f"({' | '.join(self._elements(form, 'tags', where))})"
        separator = json.dumps(_field(form, "separator", str, where))
        more = "" if form.get("stop_after_first") else f" ({separator} {tags})*"
        return f"{tags}{more}" if form.get("at_least_one") else f"({tags}{more})?"

    def _elements(self, form: Mapping[str, Any], name: str, where: str) -> list[str]:
        elements: Sequence[Any] = _field(form, name, list, where)
        if not elements:
            raise invalid(f"{where}.{name} is empty", f"{where}.{name}")
        return [self.write(part, f"{where}.{name}[{i}]") for i, part in enumerate(elements)]


def _field(form: Any, name: str, kind: Any, where: str) -> Any:
    value = form.get(name) if isinstance(form, Mapping) else None
    if not isinstance(value, kind):
        raise invalid(
            f"{where}.{name} is {brief(value)}, which is of a wrong type", f"{where}.{name}"
        )
    return value
