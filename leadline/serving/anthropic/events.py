"""Deltas -> content blocks and the events that tell of them (serving-api 8, C38)."""

from __future__ import annotations

from typing import Any

import msgspec

from leadline.serving.events import BLANK, event, event_template, json_line
from leadline.text.chat import CallArguments, CallStart, Content, Delta, Reasoning

Payload = dict[str, Any]

# What a block starts as, the type of its deltas, and the key of their text.
_THINKING = ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking")
_TEXT = ({"type": "text", "text": ""}, "text_delta", "text")


def named(payload: Payload) -> bytes:
    """An event whose name is the payload's type."""
    return event(payload, name=payload["type"])


class BlockWriter:
    """Collects the blocks of one message and writes their events.

    Blocks follow each other: a new one closes the one before; none is empty.

    Args:
        signature: of thinking blocks; clients send it back unread.

    Attributes:
        content: the blocks that are closed.
    """

    def __init__(self, signature: str) -> None:
        self.content: list[Payload] = []
        self._signature = signature
        self._block: Payload | None = None
        self._texts: list[str] = []
        self._template = b""

    def add(self, delta: Delta) -> bytes:
        """Events of one piece of the answer."""
        match delta:
            case CallStart(_, call_id, name):
                start = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return self._start(start, "input_json_delta", "partial_json")
            case Reasoning():
                data = self._continue(*_THINKING)
            case Content():
                data = self._continue(*_TEXT)
            case CallArguments():
                data = b""
        self._texts.append(delta.text)
        return data + self._template % json_line(delta.text)

    def close(self) -> bytes:
        """End the open block."""
        if self._block is None:
            return b""
        block, text, data = self._block, "".join(self._texts), b""
        index = len(self.content)
        match block["type"]:
            case "thinking":
                block |= {"thinking": text, "signature": self._signature}
                delta = {"type": "signature_delta", "signature": self._signature}
                data = named({"type": "content_block_delta", "index": index, "delta": delta})
            case "text":
                block["text"] = text
            case "tool_use":
                block["input"] = _input(text)
        self.content.append(block)
        self._block = None
        return data + named({"type": "content_block_stop", "index": index})

    def _continue(self, start: Payload, delta_type: str, key: str) -> bytes:
        """Nothing when a block of this type is open, else its start."""
        if self._block is not None and self._block["type"] == start["type"]:
            return b""
        return self._start(dict(start), delta_type, key)

    def _start(self, start: Payload, delta_type: str, key: str) -> bytes:
        data = self.close()
        self._block, self._texts = start, []
        index = len(self.content)
        name = "content_block_delta"
        delta = {"type": delta_type, key: BLANK}
        self._template = event_template({"type": name, "index": index, "delta": delta}, name=name)
        started = {"type": "content_block_start", "index": index, "content_block": start}
        return data + named(started)


def _input(arguments: str) -> Any:
    """A call's input with the model's own numbers; one that was cut has none."""
    try:
        msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
    return msgspec.Raw(arguments.encode())
