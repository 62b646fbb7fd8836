"""Deltas -> output items and numbered events (serving-api 7, C33)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leadline.serving.events import event, json_line
from leadline.serving.openai.logprobs import TokenLogprob
from leadline.serving.responses.items import (
    CallItem,
    CustomCallItem,
    MessageItem,
    OpenItem,
    ReasoningItem,
    delta_payload,
    delta_template,
)
from leadline.serving.responses.tools import ToolTable
from leadline.text.chat import CallStart, Content, Delta, Reasoning


class OutputWriter:
    """Collects the items of one response and writes their events.

    Items follow each other: a new one closes the one before.

    Args:
        tools: says which calls are free-form, and the names that the client knows.
        has_encrypted: reasoning items carry ``encrypted_content``.

    Attributes:
        output: items so far, in their present form.
    """

    def __init__(self, tools: ToolTable, *, has_encrypted: bool) -> None:
        self.output: list[dict[str, Any]] = []
        self._tools = tools
        self._has_encrypted = has_encrypted
        self._open: OpenItem | None = None
        self._template = b""
        self._sequence_number = 0

    def event(self, payload: dict[str, Any]) -> bytes:
        """``payload`` with the next sequence number, and its type as the event's name."""
        numbered = {**payload, "sequence_number": self._take_number()}
        return event(numbered, name=payload["type"])

    def add(self, delta: Delta, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """Events of one piece of the answer."""
        if isinstance(delta, CallStart):
            kind = CustomCallItem if delta.name in self._tools.custom else CallItem
            return self._start(kind(delta, self._tools))
        data = b""
        if isinstance(delta, Reasoning) and not isinstance(self._open, ReasoningItem):
            data = self._start(ReasoningItem(has_encrypted=self._has_encrypted))
        elif isinstance(delta, Content) and not isinstance(self._open, MessageItem):
            data = self._start(MessageItem())
        item = self._open
        assert item is not None, "arguments follow the start of their call"
        text = item.push(delta.text)
        if not text:  # a free-form input whose character is not complete
            return data
        if isinstance(item, MessageItem) and logprobs:
            item.logprobs += logprobs
            return data + self._item_event(delta_payload(item, text, logprobs))
        return data + self._template % (json_line(text), b"%d" % self._take_number())

    def close(self, status: str) -> bytes:
        """End the open item as ``completed`` or ``incomplete``."""
        if self._open is None:
            return b""
        data = b"".join(self._item_event(payload) for payload in self._open.closing(status))
        item = self._open.item
        self.output[-1] = item
        self._open = None
        return data + self.event(self._placed({"type": "response.output_item.done"}, item))

    def _start(self, item: OpenItem) -> bytes:
        data = self.close("completed")
        self.output.append(item.item)
        self._open = item
        self._template = delta_template(item, len(self.output) - 1)
        added = self._placed({"type": "response.output_item.added"}, dict(item.item))
        return data + self.event(added) + b"".join(map(self._item_event, item.opening()))

    def _placed(self, payload: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
        return {**payload, "output_index": len(self.output) - 1, "item": item}

    def _item_event(self, payload: dict[str, Any]) -> bytes:
        assert self._open is not None
        place = {"item_id": self._open.id, "output_index": len(self.output) - 1}
        return self.event({**payload, **place})

    def _take_number(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number
