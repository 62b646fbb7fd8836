"""Bodies of ``/v1/messages`` and ``count_tokens``; ``null`` means "not given"."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class ThinkingOptions(Struct):
    """Whether to think, and for how many tokens at most."""

    type: str
    budget_tokens: int | None = None


class OutputOptions(Struct):
    """How hard to think, and the form of the answer."""

    effort: Any = None
    format: dict[str, Any] | None = None


class Metadata(Struct):
    """Who asks; coding agents put a session's id in it."""

    user_id: str | None = None


class ToolEntry(Struct):
    """A tool; one without a schema runs on the servers of other vendors, and may have no name."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceOptions(Struct):
    """Whether a tool has to be used."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(Struct, kw_only=True):
    """What a client asks; fields that are not here are ignored (C26)."""

    messages: list[Any]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[Any] | None = None
    tools: list[ToolEntry] | None = None
    tool_choice: ToolChoiceOptions | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
