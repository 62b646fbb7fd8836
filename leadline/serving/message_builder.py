"""Deltas of one choice, joined to a whole answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from leadline.text.chat import CallArguments, CallStart, Content, Delta, Reasoning


@dataclass(slots=True)
class BuiltCall:
    """A tool call and the fragments of its JSON arguments."""

    id: str
    name: str
    fragments: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.fragments)


class MessageBuilder:
    """Collects the deltas of one choice.

    Attributes:
        calls: tool calls in order.
    """

    def __init__(self) -> None:
        self.calls: list[BuiltCall] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def add(self, deltas: Iterable[Delta]) -> None:
        """Append the next pieces."""
        for delta in deltas:
            match delta:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallStart(_, call_id, name):
                    self.calls.append(BuiltCall(call_id, name))
                case CallArguments(_, text):
                    self.calls[-1].fragments.append(text)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)
