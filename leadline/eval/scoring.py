"""Whether an answer is right: the wanted text as a whole word, or the same calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leadline.eval.exercise import Chat
from leadline.text.chat import CallArguments, CallStart, Content, Delta, Tool
from leadline.text.json_text import canonical


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; ``arguments`` is JSON as the client gets it."""

    name: str
    arguments: str


@dataclass(slots=True)
class Answer:
    """What a model said behind its reasoning.

    Attributes:
        is_cut: it ran into its limit of tokens.
    """

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    is_cut: bool = False

    def take(self, deltas: Sequence[Delta]) -> None:
        """Add what a parser releases."""
        for delta in deltas:
            match delta:
                case Content(text):
                    self.text += text
                case CallStart(name=name):
                    self.calls.append(Call(name, ""))
                case CallArguments(text=text):
                    last = self.calls[-1]
                    self.calls[-1] = Call(last.name, last.arguments + text)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a right answer holds.

    Attributes:
        text: a word or words of it; None leaves the text free.
        is_json: ``text`` is the whole answer, and what it means counts.
        calls: its calls.
        tools: what may be called.
    """

    text: str | None
    is_json: bool
    calls: tuple[Call, ...]
    tools: tuple[Tool, ...]

    @classmethod
    def of_turn(cls, chat: Chat, number: int) -> Expectation:
        """Of the assistant's turn ``number``, counted from 0."""
        message = chat.messages[chat.turns()[number]]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        return cls(
            text=chat.wanted[number] if chat.wanted else None,
            is_json=chat.response_format is not None and number == len(chat.turns()) - 1,
            calls=tuple(Call(f["name"], f["arguments"]) for f in functions),
            tools=chat.tools,
        )

    @property
    def is_judged(self) -> bool:
        """Whether any answer would be wrong."""
        return self.text is not None or bool(self.calls)

    def is_met(self, answer: Answer) -> bool:
        """Whether an answer is right; parallel calls may come in any order."""
        return (
            not answer.is_cut
            and (self.text is None or self._is_said(answer.text, self.text))
            and _meaning(answer.calls) == _meaning(self.calls)
        )

    def _is_said(self, text: str, wanted: str) -> bool:
        if self.is_json:
            return canonical(text) == canonical(wanted)
        return holds_words(text, wanted)

    def parses(self, answer: Answer) -> bool | None:
        """Whether the answer is JSON, or calls and each call fits its tool; None for free text."""
        if self.is_json:
            return _parsed(answer.text) is not None
        if not self.calls:
            return None
        schemas = {tool.name: tool.parameters or {} for tool in self.tools}
        return (
            not answer.is_cut
            and bool(answer.calls)
            and all(
                call.name in schemas and _fits(call.arguments, schemas[call.name])
                for call in answer.calls
            )
        )


def holds_words(text: str, words: str) -> bool:
    """Whether ``words`` stand alone in ``text``: no letter or digit runs into theirs, and nothing
    but space touches a sign."""
    before = r"(?<!\w)" if words[0].isalnum() else r"(?<!\S)"
    after = r"(?!\w)" if words[-1].isalnum() else r"(?!\S)"
    return re.search(before + re.escape(words) + after, text) is not None


def _meaning(calls: Sequence[Call]) -> list[tuple[str, str]]:
    return sorted((call.name, canonical(call.arguments)) for call in calls)


def _parsed(text: str) -> Any:
    """A JSON value, or None for what is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _fits(text: str, schema: Mapping[str, Any]) -> bool:
    """Whether every required property is there, none is made up, and enumerated ones are known."""
    arguments = _parsed(text)
    properties = schema.get("properties", {})
    return (
        isinstance(arguments, dict)
        and set(schema.get("required", ())) <= arguments.keys() <= properties.keys()
        and all(value in properties[name].get("enum", [value]) for name, value in arguments.items())
    )
