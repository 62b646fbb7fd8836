"""Body of ``POST /v1/responses``; ``null`` means "not given" for every optional field."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class TextOptions(Struct):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct):
    """How hard to think."""

    effort: Any = None
    summary: str | None = None


class ResponsesRequest(Struct, kw_only=True):
    """What a client asks; fields that are not here are ignored (C26)."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
