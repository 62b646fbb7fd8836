"""Content blocks -> chat messages (serving-api 8)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from reprlib import repr as brief
from typing import Any

import msgspec

from leadline.core.errors import BadRequest
from leadline.text.shapes import no_image, objects, string

logger = logging.getLogger(__name__)

# Other vendors' hosted tools: what they found is in the text that follows.
_SKIPPED = (
    "redacted_thinking",
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
)


def system_message(system: str | Sequence[Any]) -> dict[str, Any]:
    """The system texts as one message."""
    return {"role": "system", "content": _texts(system, "system")}


def chat_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages in the form of chats; a last one of the assistant is to be continued (2.5).

    Raises:
        BadRequest: an unknown role or block, with its path.
    """
    plain: list[dict[str, Any]] = []
    for i, message in enumerate(objects(messages, "messages")):
        where = f"messages[{i}]"
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            plain.append(_assistant(content, f"{where}.content"))
        elif role == "user":
            plain += _user(content, f"{where}.content")
        elif role == "system":
            plain.append({"role": "system", "content": _texts(content, f"{where}.content")})
        else:
            raise BadRequest(
                f"{where}.role is {brief(role)}; choose user, assistant or system",
                param=f"{where}.role",
            )
    if plain and plain[-1]["role"] == "assistant" and "tool_calls" not in plain[-1]:
        plain[-1]["prefix"] = True
    return plain


def _assistant(content: Any, where: str) -> dict[str, Any]:
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, path in _blocks(content, where):
        match block.get("type"):
            case "thinking":
                thoughts.append(string(block.get("thinking"), f"{path}.thinking"))
            case "tool_use":
                calls.append(_call(block, path))
            case _:
                texts += _text_parts(block, path)
    message: dict[str, Any] = {"role": "assistant", "content": texts}
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    function = {"name": string(block.get("name"), f"{where}.name"), "arguments": arguments}
    return {"id": string(block.get("id"), f"{where}.id"), "type": "function", "function": function}


def _user(content: Any, where: str) -> list[dict[str, Any]]:
    """Results first, then the text, whatever their order was (2.6)."""
    results: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for block, path in _blocks(content, where):
        if block.get("type") == "tool_result":
            call_id = string(block.get("tool_use_id"), f"{path}.tool_use_id")
            result = _texts(block.get("content"), f"{path}.content")
            results.append({"role": "tool", "tool_call_id": call_id, "content": result})
        else:
            texts += _text_parts(block, path)
    if texts or not results:
        results.append({"role": "user", "content": texts})
    return results


def _texts(content: Any, where: str) -> list[dict[str, Any]]:
    return [part for block, path in _blocks(content, where) for part in _text_parts(block, path)]


def _blocks(content: Any, where: str) -> list[tuple[Mapping[str, Any], str]]:
    """Every block with its path; a string is one of text."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    return [(block, f"{where}[{i}]") for i, block in enumerate(objects(content, where))]


def _text_parts(block: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The text of a block as parts of a chat message; none for one that is skipped."""
    kind = block.get("type")
    match kind:
        case "text":
            text = string(block.get("text"), f"{where}.text")
        case "document":
            text = _document(block, where)
        case "search_result":
            found = "\n\n".join(part["text"] for part in _texts(block.get("content"), where))
            text = f"{block.get('title', '')}\n{block.get('source', '')}\n\n{found}"
        case "tool_reference":
            text = string(block.get("tool_name"), f"{where}.tool_name")
        case "image":
            raise no_image(kind, where)
        case _ if kind in _SKIPPED:
            logger.warning("%s: a block of type %s is skipped", where, kind)
            return []
        case _:
            raise BadRequest(
                f"{where}.type is {brief(kind)}, which this server does not know",
                param=f"{where}.type",
            )
    return [{"type": "text", "text": text}]


def _document(block: Mapping[str, Any], where: str) -> str:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if isinstance(source, Mapping) and kind == "text":
        text = string(source.get("data"), f"{where}.source.data")
    elif isinstance(source, Mapping) and kind == "content":
        parts = _texts(source.get("content"), f"{where}.source.content")
        text = "\n\n".join(part["text"] for part in parts)
    else:
        raise BadRequest(
            f"{where}.source.type is {brief(kind)}; only documents of plain text are supported",
            param=f"{where}.source.type",
            code="not_supported",
        )
    title = block.get("title")
    return f"{title}\n\n{text}" if title else text
