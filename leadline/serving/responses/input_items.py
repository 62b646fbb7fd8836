"""Input items -> chat messages (serving-api 7)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from leadline.core.errors import BadRequest
from leadline.serving.responses.tools import qualified_name

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


def input_messages(given: str | Sequence[Any]) -> list[dict[str, Any]]:
    """The chat that an ``input`` describes.

    Raises:
        BadRequest: an unknown item or part: context is never lost in silence.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    history = _History()
    for i, item in enumerate(given):
        history.add(item, f"input[{i}]")
    return history.messages


class _History:
    """Collects items; an answer that came as several items becomes one assistant turn."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # of the assistant, calls may still join it
        self._reasoning: list[str] = []

    def add(self, item: Any, where: str) -> None:
        if not isinstance(item, Mapping):
            raise BadRequest(f"{where} is {item!r}; an item is an object", param=where)
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                self._add_message(item, where)
            case "reasoning":
                self._add_reasoning(item)
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
                    f"{where}.type is {kind!r}, which this server does not know",
                    param=f"{where}.type",
                )

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise BadRequest(
                f"{where}.role is {role!r}; choose one of {', '.join(_ROLES)}",
                param=f"{where}.role",
            )
        content = _texts(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._open_turn(content)
        else:
            self._turn = None
            self.messages.append({"role": role, "content": content})

    def _add_reasoning(self, item: Mapping[str, Any]) -> None:
        """Keep it for what it led to; encrypted reasoning of other vendors has no text."""
        parts = item.get("content") or item.get("summary") or ()
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        self._reasoning += [text for text in texts if isinstance(text, str)]

    def _add_call(self, item: Mapping[str, Any], where: str) -> None:
        name = item.get("name")
        if not isinstance(name, str):
            raise BadRequest(f"{where}.name is {name!r}; it must be a string", param=where)
        arguments = item.get("arguments")
        if item.get("type") == "custom_tool_call":
            arguments = msgspec.json.encode({"input": item.get("input") or ""}).decode()
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {
                "name": qualified_name(item.get("namespace"), name),
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
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where} is {content!r}; it must be a string or a list", param=where)
    return [_text_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _text_part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if kind == "input_image":
        raise BadRequest(
            f"{where}.type is 'input_image': images are not supported, this server reads text only",
            param=f"{where}.type",
            code="not_supported",
        )
    raise BadRequest(
        f"{where}.type is {kind!r}; only text parts are supported", param=f"{where}.type"
    )
