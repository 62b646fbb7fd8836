"""A conversation around the assistant's turns, rendered by ``deepseek-recipe``.

The library writes BOS, system texts, the tools block, response formats, and users' turns. What the
checklist asks beyond it is put in afterwards, each at a place that the library's own markers tell:
numeric effort (C7), schemas with their key order and numbers kept (C8), and every turn of the
assistant (C9 to C12, C15), which the library sees empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import deepseek_recipe as recipe

from leadline.core.errors import BadRequest
from leadline.text.chat import ResponseFormat
from leadline.text.json_text import dumps
from leadline.text.markers import (
    ASSISTANT,
    EOS,
    LATEST_REMINDER,
    SPECIAL_TOKENS,
    SYSTEM,
    THINK_END,
    USER,
)
from leadline.text.messages import Message
from leadline.text.profiles import Profile
from leadline.text.spans import Marker, Span
from leadline.text.thinking import Mode
from leadline.text.tokenizer import well_formed

# Stand-ins that the library can hold, and how it writes them.
_TOOL = recipe.ToolDefinition("tool")
_TOOL_LINE = '{"name": "tool", "description": "", "parameters": null}'
_SCHEMA: dict[str, Any] = {}
_SCHEMA_TEXT = "{}"


class Skeleton:
    """Renders everything but the assistant's turns.

    Attributes:
        profile: the chat format.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._encoding = profile.recipe_encoding().with_special_tokens(SPECIAL_TOKENS)

    def render(
        self,
        messages: Sequence[Message],
        mode: Mode,
        *,
        tool_lines: str = "",
        response_format: ResponseFormat | None = None,
    ) -> list[list[Span]]:
        """What stands before, between and behind the turns of the assistant: one more than those.

        Args:
            messages: the conversation; of the assistant's messages only the places count.
            mode: thinking and effort.
            tool_lines: schemas of the tools block; empty is no block.
            response_format: what the prompt tells of it (C14); None is nothing.

        Raises:
            BadRequest: a response schema that cannot be written.
        """
        schema = None
        if response_format is not None and response_format.kind == "json_schema":
            schema = _schema_text(response_format.schema)
        is_json = response_format is not None and response_format.kind == "json_object"
        conversation = recipe.Conversation(
            [_recipe_message(message) for message in messages],
            thinking_mode=mode.thinking,
            tools=[_TOOL] if tool_lines else None,
            reasoning_effort=mode.effort if isinstance(mode.effort, str) else None,
            response_format="json_object" if is_json else "text",
            response_schema=_SCHEMA if schema else None,
        )
        spans = list(_spans(self._encoding.render_conversation(conversation)))
        if isinstance(mode.effort, int):
            _replace(spans, 2, f"Effort: {self.profile.efforts['high']}", f"Effort: {mode.effort}")
        if tool_lines:
            # The block's one text that begins right behind a </think>: the schemas follow it.
            at = _index(spans, THINK_END, 1) + 1
            _replace(spans, at, _TOOL_LINE, tool_lines)
        if schema:
            at = _end_of_head(spans) - 1
            text = spans[at]
            assert isinstance(text, str)
            assert text.endswith(_SCHEMA_TEXT)
            spans[at] = text.removesuffix(_SCHEMA_TEXT) + schema
        return _around_turns(spans)


def _schema_text(schema: Any) -> str:
    try:
        return dumps(schema)
    except ValueError as error:
        raise BadRequest(f"response_format: {error}", param="response_format") from None


def _recipe_message(message: Message) -> recipe.Message:
    content = well_formed(message.content)
    match message.role:
        case "system":
            return recipe.SystemMessage(content)
        case "latest_reminder":
            return recipe.LatestReminderMessage(content)
        case "assistant":
            return recipe.AssistantMessage("")
        case "tool":
            # For V4 the library would begin a new turn at a result behind a user's text.
            return recipe.UserMessage(f"<tool_result>{content}</tool_result>")
        case "user":
            return recipe.UserMessage(content)


def _spans(rendered: recipe.RenderedPrompt) -> Iterator[Span]:
    prompt, end = rendered.prompt, 0
    for start, stop in rendered.special_ranges:
        if start > end:
            yield prompt[end:start]
        yield Marker(prompt[start:stop])
        end = stop
    if end < len(prompt):
        yield prompt[end:]


def _replace(spans: list[Span], at: int, old: str, new: str) -> None:
    text = spans[at]
    assert isinstance(text, str)
    assert old in text
    spans[at] = text.replace(old, new, 1)


def _index(spans: list[Span], marker: Marker, nth: int) -> int:
    """Where the ``nth`` (from 0) of a marker stands; equal text is no marker."""
    places = (i for i, span in enumerate(spans) if type(span) is Marker and span == marker)
    return next(place for i, place in enumerate(places) if i == nth)


def _end_of_head(spans: list[Span]) -> int:
    """The first marker of a turn: behind BOS and the first system marker."""
    turns = (USER, ASSISTANT, LATEST_REMINDER, SYSTEM)
    return next(
        i for i, span in enumerate(spans) if i > 1 and type(span) is Marker and span in turns
    )


def _around_turns(spans: list[Span]) -> list[list[Span]]:
    """Cut at every turn of the assistant, which is empty, and at the header of the next."""
    parts: list[list[Span]] = [[]]
    is_inside = False
    for span in spans:
        if type(span) is Marker and span == ASSISTANT:
            is_inside = True
            parts.append([])
        elif not is_inside:
            parts[-1].append(span)
        elif type(span) is Marker and span == EOS:
            is_inside = False
    return parts[:-1]
