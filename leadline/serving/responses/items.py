"""Output items while they grow, and the events that tell of them (serving-api 7)."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from leadline.serving.events import BLANK, event_template
from leadline.serving.openai.logprobs import TokenLogprob
from leadline.serving.responses.tools import FreeFormInput, ToolTable
from leadline.text.chat import CallStart

Payload = dict[str, Any]


class OpenItem(ABC):
    """An item that still grows.

    Args:
        kind: its ``type``.
        prefix: of its id.
        delta_type: name of the events that carry its text.
        rest: what the item holds from the start.

    Attributes:
        item: its present form; complete after ``closing``.
        id: the same in every event of the item.
        place: what an event of its text says beside the item's place.
    """

    def __init__(self, kind: str, prefix: str, delta_type: str, rest: Payload) -> None:
        self.id = f"{prefix}_{uuid.uuid4().hex}"
        self.item: Payload = {"type": kind, "id": self.id, **rest, "status": "in_progress"}
        self.delta_type = delta_type
        self.place: Payload = {}
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def opening(self) -> Iterable[Payload]:
        """Events between the item's start and its text."""
        return ()

    def push(self, text: str) -> str:
        """Take in a piece of the answer; returns what of it an event shows."""
        self._texts.append(text)
        return text

    @abstractmethod
    def closing(self, status: str) -> Iterator[Payload]:
        """Events between the item's text and its end, which make the item complete."""


class ReasoningItem(OpenItem):
    """The model's reasoning."""

    def __init__(self, *, has_encrypted: bool) -> None:
        rest: Payload = {"summary": [], "content": []}
        if has_encrypted:  # asked for by clients that send it back; the plain text is enough
            rest["encrypted_content"] = ""
        super().__init__("reasoning", "rs", "response.reasoning_text.delta", rest)
        self.place = {"content_index": 0}

    def closing(self, status: str) -> Iterator[Payload]:
        part = {"type": "reasoning_text", "text": self.text}
        self.item |= {"content": [part], "status": status}
        yield {"type": "response.reasoning_text.done", **self.place, "text": self.text}


class MessageItem(OpenItem):
    """The answer's text.

    Attributes:
        logprobs: of its tokens so far, where they were asked for.
    """

    def __init__(self) -> None:
        rest = {"role": "assistant", "content": []}
        super().__init__("message", "msg", "response.output_text.delta", rest)
        self.place = {"content_index": 0, "logprobs": []}
        self.logprobs: list[TokenLogprob] = []

    def opening(self) -> Iterable[Payload]:
        yield {"type": "response.content_part.added", "content_index": 0, "part": self._part()}

    def closing(self, status: str) -> Iterator[Payload]:
        part = self._part()
        self.item |= {"content": [part], "status": status}
        done = {"content_index": 0, "text": self.text, "logprobs": self.logprobs}
        yield {"type": "response.output_text.done", **done}
        yield {"type": "response.content_part.done", "content_index": 0, "part": part}

    def _part(self) -> Payload:
        rest = {"annotations": [], "logprobs": self.logprobs}
        return {"type": "output_text", "text": self.text, **rest}


class CallItem(OpenItem):
    """A call of a function."""

    def __init__(self, call: CallStart, tools: ToolTable) -> None:
        rest = {"call_id": call.id, **tools.client_name(call.name), "arguments": ""}
        super().__init__("function_call", "fc", "response.function_call_arguments.delta", rest)

    def closing(self, status: str) -> Iterator[Payload]:
        done = {"name": self.item["name"], "arguments": self.text}
        self.item |= {"arguments": self.text, "status": status}
        yield {"type": "response.function_call_arguments.done", **done}


class CustomCallItem(OpenItem):
    """A call of a free-form tool: its text comes out of the JSON arguments."""

    def __init__(self, call: CallStart, tools: ToolTable) -> None:
        rest = {"call_id": call.id, **tools.client_name(call.name), "input": ""}
        super().__init__("custom_tool_call", "ctc", "response.custom_tool_call_input.delta", rest)
        self._input = FreeFormInput()

    def push(self, text: str) -> str:
        return super().push(self._input.push(text))

    def closing(self, status: str) -> Iterator[Payload]:
        if rest := super().push(self._input.finish()):
            yield {"type": self.delta_type, "delta": rest}
        self.item |= {"input": self.text, "status": status}
        yield {"type": "response.custom_tool_call_input.done", "input": self.text}


def delta_template(item: OpenItem, output_index: int) -> bytes:
    """The event of a piece of an item's text; blanks: the text, then the sequence number."""
    payload = {
        "type": item.delta_type,
        "item_id": item.id,
        "output_index": output_index,
        **item.place,
        "delta": BLANK,
        "sequence_number": BLANK,
    }
    return event_template(payload, name=item.delta_type)


def delta_payload(item: OpenItem, text: str, logprobs: Sequence[TokenLogprob]) -> Payload:
    """The same with log-probabilities."""
    return {"type": item.delta_type, **item.place, "logprobs": logprobs, "delta": text}
