"""Input items -> chat messages (serving-api 7)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from reprlib import repr as brief
from typing import Any

import msgspec

from leadline.core.errors import BadRequest
from leadline.serving.responses.tools import ToolTable
from leadline.text.shapes import no_image, no_text, objects, string

logger = logging.getLogger(__name__)

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
# Items that hold nothing a model could read: references, compaction, other vendors' hosted tools.
_BOOKKEEPING = (
    "item_reference",
    "compaction",
    "compaction_summary",
    "ghost_snapshot",
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
)


def input_messages(given: str | Sequence[Any], tools: ToolTable) -> list[dict[str, Any]]:
    """The chat that an ``input`` describes; ``tools`` knows how the model names them.

    Raises:
        BadRequest: an unknown item or part: context is never lost in silence.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    history = _History(tools)
    for i, item in enumerate(objects(given, "input")):
        history.add(item, f"input[{i}]")
    return history.messages


class _History:
    """Collects items; an answer that came as several items becomes one assistant turn."""

    def __init__(self, tools: ToolTable) -> None:
        self._tools = tools
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # of the assistant, calls may still join it
        self._reasoning: list[str] = []

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """Append the next item."""
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                self._add_message(item, where)
            case "reasoning":
                self._add_reasoning(item, where)
            case "function_call" | "custom_tool_call":
                self._add_call(item, where)
            case "function_call_output" | "custom_tool_call_output":
                self._turn = None
                content = _texts(item.get("output"), f"{where}.output")
                message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
                self.messages.append(message)
            case _ if kind in _BOOKKEEPING:
                logger.debug("%s: an item of type %s is skipped", where, kind)
            case _:
                raise BadRequest(
                    f"{where}.type is {brief(kind)}, which this server does not know",
                    param=f"{where}.type",
                )

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise BadRequest(
                f"{where}.role is {brief(role)}; choose one of {', '.join(_ROLES)}",
                param=f"{where}.role",
            )
        content = _texts(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._open_turn(content)
        else:
            self._turn = None
            self.messages.append({"role": role, "content": content})

    def _add_reasoning(self, item: Mapping[str, Any], where: str) -> None:
        """Keep it for what it led to; encrypted reasoning of other vendors has no text."""
        content = objects(item.get("content"), f"{where}.content")
        parts = content or objects(item.get("summary"), f"{where}.summary")
        texts = [part.get("text") for part in parts]
        self._reasoning += [text for text in texts if isinstance(text, str)]

    def _add_call(self, item: Mapping[str, Any], where: str) -> None:
        name = string(item.get("name"), f"{where}.name")
        arguments = item.get("arguments")
        if item.get("type") == "custom_tool_call":
            arguments = msgspec.json.encode({"input": item.get("input") or ""}).decode()
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {
                "name": self._tools.model_name(item.get("namespace"), name),
                "arguments": arguments,
            },
        }
        turn = self._turn
        if turn is None or self._reasoning:
            turn = self._open_turn("")
        turn.setdefault("tool_calls", []).append(call)

    def _open_turn(self, content: str | list[dict[str, Any]]) -> dict[str, Any]:
        self._turn = {"role": "assistant", "content": content}
        if self._reasoning:
            self._turn["reasoning_content"] = "\n\n".join(self._reasoning)
            self._reasoning = []
        self.messages.append(self._turn)
        return self._turn


def _texts(content: Any, where: str) -> str | list[dict[str, Any]]:
    """A string, or the parts of one as chats have them."""
    if isinstance(content, str):
        return content
    parts = objects(content, where)
    return [_text_part(part, f"{where}[{i}]") for i, part in enumerate(parts)]


def _text_part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": string(part.get("text"), f"{where}.text")}
    if kind == "refusal":
        return {"type": "text", "text": string(part.get("refusal"), f"{where}.refusal")}
    if kind == "input_image":
        raise no_image(kind, where)
    raise no_text(kind, where)
