"""Chunks of a chat's stream: one a token, so what never changes is encoded once."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from leadline.serving.chat_run import ChatRun, ChoiceRun
from leadline.serving.events import BLANK, event, event_template, json_line
from leadline.serving.openai.answers import (
    FINGERPRINT,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    FunctionDelta,
    ToolCallDelta,
    Usage,
)
from leadline.serving.openai.logprobs import ChatLogprobs, LogprobWriter
from leadline.text.chat import CallArguments, CallStart, Content, Delta, Reasoning


class ReasoningKeys:
    """Under which keys reasoning is sent: ``--reasoning-field`` (C30)."""

    def __init__(self, setting: str) -> None:
        self._deepseek = setting in ("both", "reasoning_content")
        self._openrouter = setting in ("both", "reasoning")
        self.num_keys = self._deepseek + self._openrouter

    def spread(self, text: str) -> tuple[str | None, str | None]:
        """Values of ``reasoning_content`` and ``reasoning``."""
        return text if self._deepseek else None, text if self._openrouter else None


class ChunkWriter:
    """Writes the chunks of one stream.

    Args:
        run: the choices, and their counts for usage.
        head: id, creation time and model of every chunk.
        reasoning: the keys of reasoning.
        logprobs: writes entries; None when they were not asked for.
        has_usage: every chunk has a ``usage``, null before the last.
        counts_on: ``continuous_usage_stats``.
        usage_at_finish: the finish chunk has the usage too.
    """

    def __init__(
        self,
        run: ChatRun,
        head: tuple[str, int, str],
        reasoning: ReasoningKeys,
        *,
        logprobs: LogprobWriter | None,
        has_usage: bool,
        counts_on: bool,
        usage_at_finish: bool,
    ) -> None:
        self._run = run
        self._head = head
        self._reasoning = reasoning
        self._logprobs = logprobs
        self._no_usage: UnsetType | None = None if has_usage else UNSET
        self._counts_on = counts_on
        self._usage_at_finish = usage_at_finish
        self._is_plain = logprobs is None and not counts_on
        self._templates: dict[tuple[int, type[Delta]], bytes] = {}

    def start(self, choice: ChoiceRun) -> bytes:
        """The first chunk of a choice."""
        chunk = self._chunk(choice, ChatDelta(role="assistant", content=""))
        if choice.keeps_ids:
            chunk.prompt_token_ids = self._run.call.prompt.token_ids
        return event(chunk)

    def delta(self, choice: ChoiceRun, delta: Delta) -> bytes:
        """One piece of what a choice says."""
        if self._is_plain and not choice.keeps_ids and isinstance(delta, Content | Reasoning):
            template = self._template(choice, type(delta))
            text = json_line(delta.text)
            if isinstance(delta, Reasoning):
                return template % ((text,) * self._reasoning.num_keys)
            return template % text
        chunk = self._chunk(choice, self._wire(delta))
        part = chunk.choices[0]
        if self._logprobs is not None and (entries := choice.take_entries()):
            part.logprobs = ChatLogprobs(self._logprobs.chat(entries))
        if choice.keeps_ids:
            part.token_ids = choice.take_token_ids()
        return event(chunk)

    def finish(self, choice: ChoiceRun) -> bytes:
        """The last chunk of a choice (C45)."""
        chunk = self._chunk(choice, ChatDelta())
        part = chunk.choices[0]
        if self._logprobs is not None and (entries := choice.take_entries()):
            part.logprobs = ChatLogprobs(self._logprobs.chat(entries))
        if choice.keeps_ids:
            part.token_ids = choice.take_token_ids()
        part.finish_reason = choice.parser.finish_reason
        part.stop_reason = choice.parser.stop_reason
        if self._usage_at_finish:
            chunk.usage = Usage.of(self._run.counts())
        return event(chunk)

    def usage(self) -> bytes:
        """The chunk without choices that ends a stream (C46)."""
        return event(ChatChunk(*self._head, FINGERPRINT, [], Usage.of(self._run.counts())))

    def _template(self, choice: ChoiceRun, kind: type[Content] | type[Reasoning]) -> bytes:
        key = (choice.index, kind)
        if key not in self._templates:
            self._templates[key] = event_template(self._chunk(choice, self._wire(kind(BLANK))))
        return self._templates[key]

    def _wire(self, delta: Delta) -> ChatDelta:
        match delta:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(None, None, *self._reasoning.spread(text))
            case CallStart(index, call_id, name):
                function = FunctionDelta("", name)
                return ChatDelta(tool_calls=[ToolCallDelta(index, function, call_id, "function")])
            case CallArguments(index, text):
                return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta(text))])

    def _chunk(self, choice: ChoiceRun, delta: ChatDelta) -> ChatChunk:
        usage: Usage | UnsetType | None = self._no_usage
        if self._counts_on:
            usage = Usage.of(self._run.counts())
        return ChatChunk(*self._head, FINGERPRINT, [ChatChunkChoice(choice.index, delta)], usage)
