"""Chat messages as clients send them -> the stricter form that ``deepseek-recipe`` accepts.

Agents resend history written by their own serialisers; everything here is repair, and every error
names the place in the request (serving-api 2.2, 2.5, 2.6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from leadline.core.errors import BadRequest

# ``developer`` is another word for ``system`` (2.2).
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "latest_reminder": "latest_reminder",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image_url", "image", "input_image")


def normalize_messages(
    messages: Sequence[Any], *, continue_final_message: bool = False
) -> list[dict[str, Any]]:
    """Messages with known roles, string contents and complete tool turns.

    ``continue_final_message`` is another way to set ``prefix`` on the last one (C10).

    Raises:
        BadRequest: no messages, an unknown role, a part that is not text (C5), a wrong type,
            ``prefix`` where nothing can be continued.
    """
    if not messages:
        raise BadRequest("messages is empty; a chat needs at least one message", param="messages")
    plain = [_normalize(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if continue_final_message:
        plain[-1]["prefix"] = True
    for i, message in enumerate(plain):
        if "prefix" in message and (i + 1 < len(plain) or message["role"] != "assistant"):
            raise BadRequest(
                f"messages[{i}].prefix: only a last message of the assistant can be continued",
                param=f"messages[{i}].prefix",
            )
    return _complete_tool_turns(plain)


def _normalize(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where} is {message!r}; a message is an object", param=where)
    role = message.get("role")
    if role not in _ROLES:
        raise BadRequest(
            f"{where}.role is {role!r}; choose one of {', '.join(_ROLES)}", param=f"{where}.role"
        )
    plain: dict[str, Any] = {
        "role": _ROLES[role],
        "content": _text(message.get("content"), f"{where}.content"),
    }
    if role == "tool":
        plain["tool_call_id"] = _string(message.get("tool_call_id"), f"{where}.tool_call_id")
    if role == "assistant":
        reasoning = message.get("reasoning_content")
        if reasoning is None:
            reasoning = message.get("reasoning")
        if reasoning is not None:
            plain["reasoning_content"] = _string(reasoning, f"{where}.reasoning_content")
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    if message.get("prefix"):
        plain["prefix"] = True
    return plain


def _text(content: Any, where: str) -> str:
    """One string of a message's content; the parts of a list are joined by a blank line."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where} is {content!r}; it must be a string or a list", param=where)
    return "\n\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXT_PARTS:
        return _string(part.get("text"), f"{where}.text")
    if kind in _IMAGE_PARTS:
        raise BadRequest(
            f"{where}.type is {kind!r}: images are not supported, this server reads text only",
            param=f"{where}.type",
            code="not_supported",
        )
    raise BadRequest(
        f"{where}.type is {kind!r}; only text parts are supported", param=f"{where}.type"
    )


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadRequest(f"{where} is {calls!r}; it must be a list", param=where)
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise BadRequest(f"{where} has no function object", param=f"{where}.function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):  # an object is as good as its JSON (C11)
        arguments = msgspec.json.encode(arguments or {}).decode()
    name = _string(function.get("name"), f"{where}.function.name")
    return {
        "id": _string(call.get("id"), f"{where}.id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{where} is {value!r}; it must be a string", param=where)
    return value


def _complete_tool_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every tool call exactly one result, so that an interrupted agent can go on (2.6).

    A missing result becomes an empty one. A result that answers no call becomes user text with the
    same rendering.
    """
    complete: list[dict[str, Any]] = []
    open_calls: list[str] = []
    orphans: list[dict[str, Any]] = []

    def close_turn() -> None:
        complete.extend(
            {"role": "tool", "tool_call_id": call_id, "content": ""} for call_id in open_calls
        )
        complete.extend(orphans)
        open_calls.clear()
        orphans.clear()

    for message in messages:
        if message["role"] != "tool":
            close_turn()
            complete.append(message)
            open_calls.extend(call["id"] for call in message.get("tool_calls", ()))
        elif message["tool_call_id"] in open_calls:
            open_calls.remove(message["tool_call_id"])
            complete.append(message)
        else:
            text = f"<tool_result>{message['content']}</tool_result>"
            orphans.append({"role": "user", "content": text})
    close_turn()
    return complete
