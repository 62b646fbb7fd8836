"""An exercise: a chat, or a passage, whose right answers are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leadline.text.chat import ChatInput, ResponseFormat, Tool

Message = Mapping[str, Any]  # as clients of OpenAI's chat endpoint send it


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation with every assistant turn in place; each of them can be learnt or asked for.

    Attributes:
        family: the generator's name, such as ``recall``.
        messages: in OpenAI's form; assistant turns hold the right answer, with
            ``reasoning_content`` where ``thinking``.
        wanted: one entry per assistant turn: the text that a right answer holds as a whole word;
            None where the turn's calls decide, or where nothing is judged.
        cell: what an evaluation groups by, such as ``1024`` or ``25% of 1024``.
        response_format: of the last turn.
    """

    family: str
    messages: Sequence[Message]
    wanted: Sequence[str | None] = ()
    cell: str = ""
    tools: tuple[Tool, ...] = ()
    thinking: bool = False
    reasoning_effort: str | int | None = None
    response_format: ResponseFormat | None = None

    def turns(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def before(self, turn: int) -> ChatInput:
        """The request that message ``turn`` answers."""
        is_last = turn == self.turns()[-1]
        return ChatInput(
            self.messages[:turn],
            tools=self.tools,
            thinking=self.thinking,
            reasoning_effort=self.reasoning_effort,
            response_format=self.response_format if is_last else None,
        )

    def whole(self) -> ChatInput:
        """The finished conversation, nothing left to answer."""
        return ChatInput(
            self.messages,
            tools=self.tools,
            thinking=self.thinking,
            reasoning_effort=self.reasoning_effort,
            response_format=self.response_format,
            add_generation_prompt=False,
        )


@dataclass(frozen=True, slots=True)
class Passage:
    """Plain text without a chat around it: prose, or a dense drill where all of it is learnt."""

    family: str
    text: str


Exercise = Chat | Passage
