"""Output items while they grow, and the events that tell of them (serving-api 7)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from leadline.serving.openai.logprobs import TokenLogprob
from leadline.serving.responses.tools import FreeFormInput, ToolTable
from leadline.serving.templates import BLANK, event_template
from leadline.text.chat import CallStart

Payload = dict[str, Any]


class OpenItem(Protocol):
    """An item that still grows.

    Attributes:
        item: its present form; complete after ``closing``.
        id: the same in every event of the item.
        delta_type: name of the events that carry its text.
        text_place: what such an event says beside the item's place.
    """

    item: Payload
    id: str
    delta_type: str
    text_place: Payload

    def opening(self) -> Iterator[Payload]: ...

    def push(self, text: str) -> str: ...

    def closing(self, status: str) -> Iterator[Payload]: ...


class ReasoningItem:
    """The model's reasoning."""

    delta_type = "response.reasoning_text.delta"
    text_place: Payload = {"content_index": 0}

    def __init__(self, *, has_encrypted: bool) -> None:
        self.id = f"rs_{uuid.uuid4().hex}"
        self.item: Payload = {"type": "reasoning", "id": self.id, "summary": [], "content": []}
        if has_encrypted:  # asked for by clients that send it back; the plain text is enough
            self.item["encrypted_content"] = ""
        self.item["status"] = "in_progress"
        self._texts: list[str] = []

    def opening(self) -> Iterator[Payload]:
        return iter(())

    def push(self, text: str) -> str:
        self._texts.append(text)
        return text

    def closing(self, status: str) -> Iterator[Payload]:
        text = "".join(self._texts)
        self.item |= {"content": [{"type": "reasoning_text", "text": text}], "status": status}
        yield {"type": "response.reasoning_text.done", "content_index": 0, "text": text}


class MessageItem:
    """The answer's text."""

    delta_type = "response.output_text.delta"
    text_place: Payload = {"content_index": 0, "logprobs": []}

    def __init__(self) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self.item: Payload = {
            "type": "message",
            "id": self.id,
            "role": "assistant",
            "content": [],
            "status": "in_progress",
        }
        self.logprobs: list[TokenLogprob] = []
        self._texts: list[str] = []

    def opening(self) -> Iterator[Payload]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield {"type": "response.content_part.added", "content_index": 0, "part": part}

    def push(self, text: str) -> str:
        self._texts.append(text)
        return text

    def closing(self, status: str) -> Iterator[Payload]:
        text, logprobs = "".join(self._texts), self.logprobs
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        self.item |= {"content": [part], "status": status}
        done = {"content_index": 0, "text": text, "logprobs": logprobs}
        yield {"type": "response.output_text.done", **done}
        yield {"type": "response.content_part.done", "content_index": 0, "part": part}


class CallItem:
    """A call of a function."""

    delta_type = "response.function_call_arguments.delta"
    text_place: Payload = {}

    def __init__(self, call: CallStart, tools: ToolTable) -> None:
        self.id = f"fc_{uuid.uuid4().hex}"
        self.item: Payload = {
            "type": "function_call",
            "id": self.id,
            "call_id": call.id,
            **tools.client_name(call.name),
            "arguments": "",
            "status": "in_progress",
        }
        self._texts: list[str] = []

    def opening(self) -> Iterator[Payload]:
        return iter(())

    def push(self, text: str) -> str:
        self._texts.append(text)
        return text

    def closing(self, status: str) -> Iterator[Payload]:
        arguments = "".join(self._texts)
        self.item |= {"arguments": arguments, "status": status}
        yield {
            "type": "response.function_call_arguments.done",
            "name": self.item["name"],
            "arguments": arguments,
        }


class CustomCallItem:
    """A call of a free-form tool: its text comes out of the JSON arguments."""

    delta_type = "response.custom_tool_call_input.delta"
    text_place: Payload = {}

    def __init__(self, call: CallStart, tools: ToolTable) -> None:
        self.id = f"ctc_{uuid.uuid4().hex}"
        self.item: Payload = {
            "type": "custom_tool_call",
            "id": self.id,
            "call_id": call.id,
            **tools.client_name(call.name),
            "input": "",
            "status": "in_progress",
        }
        self._input = FreeFormInput()

    def opening(self) -> Iterator[Payload]:
        return iter(())

    def push(self, text: str) -> str:
        return self._input.push(text)

    def closing(self, status: str) -> Iterator[Payload]:
        if rest := self._input.finish():
            yield {"type": self.delta_type, "delta": rest}
        self.item |= {"input": self._input.text, "status": status}
        yield {"type": "response.custom_tool_call_input.done", "input": self._input.text}


def delta_template(item: OpenItem, output_index: int) -> bytes:
    """The event of a piece of an item's text; blanks: the text, then the sequence number."""
    payload = {
        "type": item.delta_type,
        "item_id": item.id,
        "output_index": output_index,
        **item.text_place,
        "delta": BLANK,
        "sequence_number": BLANK,
    }
    return event_template(payload, name=item.delta_type)


def delta_payload(item: OpenItem, text: str, logprobs: Sequence[TokenLogprob]) -> Payload:
    """The same with log-probabilities."""
    place = {**item.text_place, "logprobs": logprobs}
    return {"type": item.delta_type, **place, "delta": text}
