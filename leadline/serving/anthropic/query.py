"""Body of a message -> ``ChatQuery`` (serving-api 8)."""

from __future__ import annotations

import hashlib
import logging
from reprlib import repr as brief
from typing import Any

from leadline.core.errors import BadRequest
from leadline.serving.anthropic.blocks import chat_messages, system_message
from leadline.serving.anthropic.schema import (
    MessagesRequest,
    Metadata,
    OutputOptions,
    ToolChoiceOptions,
    ToolEntry,
)
from leadline.serving.chat_call import ChatQuery
from leadline.serving.formats import answer_format
from leadline.serving.origin import Origin
from leadline.text.chat import ChatInput, Tool, ToolChoice
from leadline.text.shapes import string
from leadline.text.thinking import thinking_of

logger = logging.getLogger(__name__)

_MIN_BUDGET_TOKENS = 1024


def messages_query(body: MessagesRequest) -> ChatQuery:
    """What a request asks; one that only counts tokens has no ``max_tokens``.

    Raises:
        BadRequest: a field that cannot be served as it stands.
    """
    messages = chat_messages(body.messages)
    if messages and body.system:
        messages.insert(0, system_message(body.system))
    options = body.output_config or OutputOptions()
    given = options.format
    form = answer_format(given, (given or {}).get("schema"), where="output_config.format")
    return ChatQuery(
        model=body.model,
        chat=ChatInput(
            messages=messages,
            tools=_tools(body.tools or []),
            tool_choice=_tool_choice(body.tool_choice, body.tools or []),
            thinking=thinking_of(None, {"type": body.thinking.type} if body.thinking else None),
            reasoning_effort=options.effort,
            response_format=form.shown,
        ),
        sampling=_sampling(body),
        max_tokens=body.max_tokens,
        may_refuse_limit=False,
        structured=form.enforced,
        origin=Origin(
            session_id=body.session_id,
            user=_hashed((body.metadata or Metadata()).user_id),
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
        ),
    )


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    given: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(body, name)) is not None
    }
    if body.stop_sequences:
        given["stop"] = body.stop_sequences
    if body.thinking is not None and body.thinking.type == "enabled":
        given["thinking_token_budget"] = _budget(body.thinking.budget_tokens, body.max_tokens)
    return given


def _budget(num_tokens: int | None, max_tokens: int | None) -> int:
    param = "thinking.budget_tokens"
    if num_tokens is None or num_tokens < _MIN_BUDGET_TOKENS:
        raise BadRequest(
            f"{param} is {num_tokens}; it must be at least {_MIN_BUDGET_TOKENS}", param=param
        )
    if max_tokens is not None and num_tokens >= max_tokens:
        raise BadRequest(
            f"{param} is {num_tokens}; it must be less than max_tokens ({max_tokens})", param=param
        )
    return num_tokens


def _tools(entries: list[ToolEntry]) -> tuple[Tool, ...]:
    tools = []
    for i, entry in enumerate(entries):
        if entry.input_schema is None:
            logger.warning(
                "tools[%d]: hosted tools of type %s do not exist here, dropped",
                i,
                brief(entry.type),
            )
            continue
        name = string(entry.name, f"tools[{i}].name")
        tools.append(Tool(name, entry.description or "", entry.input_schema, bool(entry.strict)))
    return tuple(tools)


def _tool_choice(given: ToolChoiceOptions | None, entries: list[ToolEntry]) -> ToolChoice:
    if given is None:
        return ToolChoice()
    parallel = not given.disable_parallel_tool_use
    if _demands_hosted(given, entries):
        return ToolChoice(parallel=parallel)
    match given.type:
        case "auto":
            return ToolChoice("auto", parallel=parallel)
        case "any":
            return ToolChoice("required", parallel=parallel)
        case "none":
            return ToolChoice("none")
        case "tool" if given.name is not None:
            return ToolChoice("named", name=given.name, parallel=False)
    raise BadRequest(
        f"tool_choice.type is {brief(given.type)}; choose auto, any, none, or tool with its name",
        param="tool_choice.type",
    )


def _demands_hosted(given: ToolChoiceOptions, entries: list[ToolEntry]) -> bool:
    """Whether every tool that could be called was dropped: an agent that searches goes on (C64)."""
    if given.type not in ("any", "tool"):
        return False
    chosen = [entry for entry in entries if given.type == "any" or entry.name == given.name]
    return bool(chosen) and all(entry.input_schema is None for entry in chosen)


def _hashed(user_id: str | None) -> str | None:
    """A key of fixed length: coding agents send whole objects (serving-api 13.1)."""
    return None if user_id is None else hashlib.sha256(user_id.encode()).hexdigest()
