"""Chat messages as clients send them -> one strict form, with every error naming its place.

Agents resend history written by their own serialisers, so most of this is repair
(serving-api 2.2, 2.5, 2.6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as brief
from typing import Any, Literal, TypeAlias

from leadline.core.errors import BadRequest
from leadline.text.json_text import dumps
from leadline.text.shapes import no_image, no_text, string

Role: TypeAlias = Literal["system", "user", "assistant", "tool", "latest_reminder"]

# ``developer`` is another word for ``system`` (2.2), ``function`` an old one for ``tool``.
_ROLES: dict[Any, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "latest_reminder": "latest_reminder",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image_url", "image", "input_image")
# A coding agent's line that changes on every request and would defeat the prefix cache (C34).
_BILLING_HEADER = "x-anthropic-billing-header"
# The one call of a message in the form that had no ids.
_LEGACY_CALL_ID = "function_call"


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the history; ``arguments`` are as the client spelled them."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message with its content as one string.

    Attributes:
        where: its path in the request.
        reasoning: an assistant's; empty where there was none.
        call_id: a tool's: the call that it answers.
        task: a user's quick instruction; whether it exists is checked where it is rendered.
        is_partial: an assistant's turn that goes on.
    """

    where: str
    role: Role
    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    task: str | None = None
    is_partial: bool = False


def normalise_messages(
    messages: Sequence[Any], *, continue_final_message: bool = False
) -> list[Message]:
    """Messages of known roles and types.

    ``continue_final_message`` is another way to set ``prefix`` on the last one (C10).

    Raises:
        BadRequest: no messages, an unknown role, a part that is not text (C5), a wrong type,
            ``prefix`` where nothing can be continued.
    """
    plain = [_normalise(message, f"messages[{i}]") for i, message in enumerate(messages)]
    plain = [m for m, raw in zip(plain, messages, strict=True) if not _held_billing_only(m, raw)]
    if not plain:
        raise BadRequest("messages is empty; a chat needs at least one message", param="messages")
    if continue_final_message:
        plain[-1] = replace(plain[-1], is_partial=True)
    for message in plain:
        if not message.is_partial:
            continue
        if message is not plain[-1] or message.role != "assistant" or message.calls:
            raise BadRequest(
                f"{message.where}.prefix: only a last message of the assistant, without tool "
                "calls, can be continued",
                param=f"{message.where}.prefix",
            )
    return plain


def _normalise(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where} is {brief(message)}; a message is an object", param=where)
    name = message.get("role")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRequest(
            f"{where}.role is {brief(name)}; choose one of {', '.join(_ROLES)}",
            param=f"{where}.role",
        )
    parts = _texts(message.get("content"), f"{where}.content")
    if role == "system":
        parts = [rest for part in parts if (rest := _without_billing_line(part)) or not part]
    content = "\n\n".join(parts)
    is_partial = bool(message.get("prefix"))
    if role == "assistant":
        reasoning = message.get("reasoning_content")
        if reasoning is None:
            reasoning = message.get("reasoning")
        return Message(
            where,
            role,
            content,
            reasoning=string(reasoning or "", f"{where}.reasoning_content"),
            calls=_calls(message, where),
            is_partial=is_partial,
        )
    call_id = ""
    if role == "tool":
        legacy = _LEGACY_CALL_ID if name == "function" else None
        call_id = string(legacy or message.get("tool_call_id"), f"{where}.tool_call_id")
    task = message.get("task") if role == "user" else None
    return Message(where, role, content, call_id=call_id, task=task, is_partial=is_partial)


def _texts(content: Any, where: str) -> list[str]:
    """The texts of a message's content, which a blank line joins."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where} is {brief(content)}; it must be a string or a list", param=where)
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXT_PARTS:
        return string(part.get("text"), f"{where}.text")
    if kind in _IMAGE_PARTS:
        raise no_image(kind, where)
    raise no_text(kind, where)


def _without_billing_line(text: str) -> str:
    if not text.startswith(_BILLING_HEADER):
        return text
    return text.partition("\n")[2].lstrip("\n")


def _held_billing_only(message: Message, raw: Mapping[str, Any]) -> bool:
    return message.role == "system" and not message.content and bool(raw.get("content"))


def _calls(message: Mapping[str, Any], where: str) -> tuple[Call, ...]:
    if legacy := message.get("function_call"):
        call = {"id": _LEGACY_CALL_ID, "function": legacy}
        return (_call(call, f"{where}.function_call"),)
    calls = message.get("tool_calls") or ()
    where = f"{where}.tool_calls"
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadRequest(f"{where} is {brief(calls)}; it must be a list", param=where)
    return tuple(_call(call, f"{where}[{i}]") for i, call in enumerate(calls))


def _call(call: Any, where: str) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise BadRequest(f"{where} has no function object", param=f"{where}.function")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = "{}"
    elif not isinstance(arguments, str):  # an object is as good as its JSON (C11)
        arguments = _json(arguments, f"{where}.function.arguments")
    name = string(function.get("name"), f"{where}.function.name")
    return Call(string(call.get("id"), f"{where}.id"), name, arguments)


def _json(value: Any, where: str) -> str:
    try:
        return dumps(value)
    except ValueError as error:
        raise BadRequest(f"{where}: {error}", param=where) from None
