"""What crosses between ``serving`` and ``text``: a chat in any dialect, its prompt, its answer."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Effort: TypeAlias = str | int


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of the arguments, in the client's key order.
        strict: arguments are constrained to the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model has to call (serving-api 5.2).

    Attributes:
        mode: ``required`` is at least one call; ``named`` exactly one of ``name``.
        allowed: names that may be called; None is every declared tool.
        parallel: False is one call at most.
    """

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the prompt says about the answer's form (serving-api 2.7)."""

    kind: Literal["json_object", "json_schema"]
    schema: Any = None


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A chat request of any dialect, in the form of OpenAI's chat endpoint (serving-api 2).

    Attributes:
        messages: as clients send them; checked and repaired by ``text.messages``.
        thinking: None takes the effort's or the server's default.
        reasoning_effort: a level's name or a number, not checked yet.
        drop_thinking: whether prior reasoning is left out; None decides by the tools.
        task: a quick instruction, such as ``title``.
        continue_final_message: the last message is an assistant's and goes on.
        add_generation_prompt: whether an assistant turn is opened at the end.
    """

    messages: Sequence[Any]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    thinking: bool | None = None
    reasoning_effort: Effort | None = None
    drop_thinking: bool | None = None
    response_format: ResponseFormat | None = None
    task: str | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True


class AnswerStart(enum.Enum):
    """Where in an assistant turn the generated tokens begin (serving-api 3.2)."""

    REASONING = enum.auto()
    REASONING_CONTINUED = enum.auto()  # leading newlines belong to it
    CONTENT = enum.auto()
    CONTENT_CONTINUED = enum.auto()
    TOOL_BLOCK = enum.auto()  # the prompt opened the block
    PLAIN = enum.auto()  # a quick instruction: no reasoning, no calls

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning is open."""
        return self in (AnswerStart.REASONING, AnswerStart.REASONING_CONTINUED)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """An encoded chat, and what is needed to read the answer.

    Attributes:
        thinking: whether the model thinks before it answers.
        is_max_effort: with thinking: the highest named level, or 100.
        tools: what the model was told of; empty with ``tool_choice`` none.
    """

    token_ids: tuple[int, ...]
    start: AnswerStart
    thinking: bool
    is_max_effort: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()

    def default_max_tokens(self, max_model_len: int) -> int:
        """Output limit of a request that sets none, lowered to what is left (serving-api 5.1)."""
        limit = 8192
        if self.thinking:
            limit = 131072 if self.is_max_effort else 65536
        return max(1, min(limit, max_model_len - len(self.token_ids)))


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins: its name is complete. Calls count from 0 and never overlap."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of a call's JSON arguments."""

    index: int
    text: str


Delta: TypeAlias = Reasoning | Content | CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn with tool calls as the model wrote it, to be rendered again exactly (C12).

    Attributes:
        token_ids: generated ids behind the end of reasoning, without the end token.
        calls: (id, name, JSON arguments) as they were sent to the client.
    """

    token_ids: tuple[int, ...]
    content: str
    calls: tuple[tuple[str, str, str], ...]
