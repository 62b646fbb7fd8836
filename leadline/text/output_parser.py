"""Output tokens of a chat -> reasoning, content and tool calls, as they arrive (serving-api 3).

One state machine serves streams and whole answers, so they cannot differ (C18). The markers of
reasoning and tool calls count only as their single ids; spelled with ordinary tokens they are text.
"""

from __future__ import annotations

import enum
import io
import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from leadline.core.request import FinishReason, SamplingParams, TokenOutput
from leadline.text.blanks import Blanks
from leadline.text.chat import (
    AnswerStart,
    CallStart,
    ChatPrompt,
    Content,
    Delta,
    Reasoning,
    SampledTurn,
)
from leadline.text.detokenizer import Detokenizer, StopStrings, shown_token_ids, stop_token
from leadline.text.dsml import Tag, TagReader
from leadline.text.markers import DSML, THINK_END, THINK_START
from leadline.text.tokenizer import Tokenizer
from leadline.text.tool_calls import ToolCallReader

logger = logging.getLogger(__name__)

# What stands before the marker of a tag. It is held back until the next token decides.
_TAG_STARTS = ("<", "</")


class _State(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALLS = enum.auto()  # from the first tag of a tool block to the end of the answer


_STATE_AT = {
    AnswerStart.REASONING: _State.REASONING,
    AnswerStart.REASONING_CONTINUED: _State.REASONING,
    AnswerStart.TOOL_BLOCK: _State.CALLS,
}


class Fault(enum.StrEnum):
    """What a parser met that its client does not see."""

    INTERNAL_ERROR = enum.auto()
    BLOCK_WITHOUT_CALL = enum.auto()
    BLOCK_WITHOUT_TOOLS = enum.auto()  # withheld: the client declared none


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """What the server's configuration says about parsing.

    Attributes:
        coerces: arguments of a declared type that arrive as another are converted.
        raw_markup: tool markup is content where the request has no tools.
    """

    coerces: bool = True
    raw_markup: bool = False


class OutputParser:
    """Engine outputs of one choice -> deltas.

    Attributes:
        num_tokens: tokens generated so far, up to and with the one that completed a stop string.
        num_reasoning_tokens: those of the reasoning, its end marker not counted.
        finish_reason: None while the choice runs. A stop string sets it before the engine does:
            the caller then closes its stream of outputs.
        stop_reason: the stop string or stop token id that ended the choice; None for the end
            token and for length.
        faults: how often what went wrong.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: ChatPrompt,
        sampling: SamplingParams,
        *,
        options: ParserOptions = ParserOptions(),
    ) -> None:
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: Literal["stop", "length", "tool_calls"] | None = None
        self.stop_reason: str | int | None = None
        self.faults: Counter[Fault] = Counter()
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._sampling = sampling
        self._eos = tokenizer.eos_token_id
        self._added = tokenizer.added_ids
        self._think_start = tokenizer.marker_id(THINK_START)
        self._think_end = tokenizer.marker_id(THINK_END)
        self._dsml = tokenizer.marker_id(DSML)
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        self._state = _STATE_AT.get(prompt.start, _State.CONTENT)
        self._deltas: list[Delta] = []
        self._said = io.StringIO()  # all content
        self._sampled = array("I")
        # Whether the sampled ids can stand in a prompt as the whole turn behind its reasoning.
        self._is_whole_turn = prompt.start is not AnswerStart.CONTENT_CONTINUED
        self._reads_calls = bool(prompt.tools) and prompt.start is not AnswerStart.PLAIN
        self._as_text: tuple[int, ...] = ()
        if prompt.start is AnswerStart.PLAIN:
            self._as_text = (self._think_start, self._think_end, self._dsml)
        elif options.raw_markup and not prompt.tools:
            self._as_text = (self._dsml,)
        self._tag_start = ""
        self._tag: TagReader | None = None
        continued = (AnswerStart.REASONING_CONTINUED, AnswerStart.CONTENT_CONTINUED)
        is_new = prompt.start not in (*continued, AnswerStart.PLAIN)
        self._reasoning_blanks = Blanks("\n", at_start=is_new)
        # Where no call can follow, nothing waits: a stop string of newlines is found at once.
        self._content_blanks = Blanks(None if self._reads_calls else "", at_start=is_new)
        self._stop = StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
        self._calls = ToolCallReader(
            prompt.tools,
            max_calls=_max_calls(prompt),
            coerces=options.coerces,
            emit=self._deltas.append,
        )

    def push(self, output: TokenOutput) -> list[Delta]:
        """The deltas that ``output`` releases; the whole rest when it ends the request.

        A defect of the parser loses the token at hand and never the stream (serving-api 3.6).
        """
        shown = shown_token_ids(output, self._sampling, eos=self._eos)
        for token_id in shown:
            self.num_tokens += 1
            try:
                self._take(token_id)
            except Exception as error:
                self._note_failure(error)
            if self.finish_reason is not None:
                break
        else:
            self.num_tokens += len(output.token_ids) - len(shown)
            if output.finish_reason is not None:
                self._end(output, is_cut=output.finish_reason is FinishReason.LENGTH)
        deltas = self._deltas.copy()
        self._deltas.clear()
        if len(deltas) > 1:
            deltas = list(_merge(deltas))
        return deltas

    def sampled_turn(self) -> SampledTurn | None:
        """An ended turn with calls as the model wrote it (C12).

        None where the ids behind the reasoning would not render this turn again: no calls, or
        some that were not sent, a call inside the reasoning, reasoning inside the content, a cut.
        """
        if self.finish_reason != "tool_calls" or not self._is_whole_turn or self._calls.num_ignored:
            return None
        calls = [(call.id, call.name, call.arguments.getvalue()) for call in self._calls.calls]
        return SampledTurn(tuple(self._sampled), self._said.getvalue(), tuple(calls))

    def _take(self, token_id: int) -> None:
        if token_id != self._eos:
            self._sampled.append(token_id)
        if token_id in self._added and token_id not in self._as_text:
            self._marker(token_id)
            return
        if self._state is _State.REASONING:
            self.num_reasoning_tokens += 1
        if text := self._detokenizer.push((token_id,)):
            self._text(text)

    def _text(self, text: str) -> None:
        """Pass text on, but for an end that may belong to a tag."""
        if self._tag_start:
            text = self._tag_start + text
            self._tag_start = ""
        if text.endswith(_TAG_STARTS):
            self._tag_start = "<" if text[-1] == "<" else "</"
            text = text.removesuffix(self._tag_start)
        if text:
            self._route(text)

    def _route(self, text: str) -> None:
        if self._tag is not None:
            if (found := self._tag.push(text)) is not None:
                self._finish_tag(*found)
        elif self._state is _State.CALLS:
            self._calls.text(text)
        elif self._state is _State.CONTENT:
            self._content(self._content_blanks.push(text))
        elif text := self._reasoning_blanks.push(text):
            self._deltas.append(Reasoning(text))

    def _content(self, text: str) -> None:
        # Stop strings are not honoured before min_tokens (serving-api 9.1).
        if self.num_tokens > self._sampling.min_tokens:
            text = self._stop.push(text)
            if self._stop.matched is not None:
                self.finish_reason, self.stop_reason = "stop", self._stop.matched
        self._emit_content(text)

    def _emit_content(self, text: str) -> None:
        if text:
            self._said.write(text)
            self._deltas.append(Content(text))

    def _marker(self, token_id: int) -> None:
        """Take an added token: none of them is ever text."""
        if token_id not in (self._think_start, self._think_end, self._dsml):
            return
        if rest := self._detokenizer.finish():
            self._text(rest)
        tag_start, self._tag_start = self._tag_start, ""
        if token_id == self._dsml and not tag_start:
            return  # only "<" or "</" before it makes it a tag
        if self._tag is not None:
            self._finish_tag(*self._tag.close())
        if token_id == self._dsml:
            self._tag = TagReader(is_closing=tag_start == "</")
            return
        if tag_start:
            self._route(tag_start)
        if token_id == self._think_end and self._state is _State.REASONING:
            self._state = _State.CONTENT
            self._reasoning_blanks.drop()
            self._content_blanks.at_start = True
            del self._sampled[:]
        elif token_id == self._think_start and self._state is _State.CONTENT:
            self._state = _State.REASONING
            self._reasoning_blanks.at_start = True
            self._is_whole_turn = False

    def _finish_tag(self, tag: Tag, rest: str) -> None:
        """Take a tag and the text that came behind it."""
        self._tag = None
        if self._state is not _State.CALLS and tag.kind is not None and not tag.is_closing:
            self._is_whole_turn &= self._state is _State.CONTENT
            self._state = _State.CALLS
            self._reasoning_blanks.drop()
            self._content_blanks.drop()
            self._emit_content(self._stop.finish())  # it was no stop string
        if self._state is _State.CALLS:
            self._calls.tag(tag)
        if rest:
            self._route(rest)

    def _end(self, output: TokenOutput, *, is_cut: bool) -> None:
        try:
            self._flush(is_cut)
        except Exception as error:
            self._note_failure(error)
        if self.finish_reason is not None:  # a stop string at the very end
            return
        self.stop_reason = stop_token(output, eos=self._eos)
        if is_cut:
            self.finish_reason = "length"
        else:
            self.finish_reason = "tool_calls" if self._calls.calls else "stop"

    def _flush(self, is_cut: bool) -> None:
        """Release what is held back; a tag that was not finished is none."""
        if rest := self._detokenizer.finish():
            self._text(rest)
        # Where calls are read, half a tag is no text if the rest was cut off, nor is half a block
        # a fault.
        may_be_half = is_cut and self._reads_calls
        if self._tag_start and self._tag is None and not may_be_half:
            self._route(self._tag_start)
        if self._state is _State.CALLS and not self._calls.calls and not may_be_half:
            self._note_dropped_block()
        if self._state is not _State.CALLS:
            if text := self._reasoning_blanks.drop():
                self._deltas.append(Reasoning(text))
            self._content(self._content_blanks.drop())
            self._emit_content(self._stop.finish())
        elif is_cut:
            self._calls.cut()
        else:
            self._calls.finish()

    def _note_dropped_block(self) -> None:
        fault = Fault.BLOCK_WITHOUT_CALL if self._prompt.tools else Fault.BLOCK_WITHOUT_TOOLS
        self.faults[fault] += 1
        logger.debug("%s: %r", fault, self._tokenizer.decode(self._sampled))

    def _note_failure(self, error: Exception) -> None:
        self.faults[Fault.INTERNAL_ERROR] += 1
        self._tag = None  # else a tag that cannot be read would swallow the rest
        # The message may quote the answer, which only a debug line may.
        logger.error("the output parser failed (%s); the stream goes on", type(error).__name__)
        logger.debug("the output parser failed", exc_info=error)


def _max_calls(prompt: ChatPrompt) -> int | None:
    """How many calls a client is told of; None is all (serving-api 3.7, 5.2)."""
    if not prompt.tools:
        return 0
    is_single = prompt.tool_choice.mode == "named" or not prompt.tool_choice.parallel
    return 1 if is_single else None


def _merge(deltas: list[Delta]) -> Iterator[Delta]:
    """Join neighbours of one kind; between the arguments of two calls the second one starts."""
    for kind, run in groupby(deltas, type):
        if kind is CallStart:
            yield from run
            continue
        pieces = [delta for delta in run if not isinstance(delta, CallStart)]
        yield replace(pieces[0], text="".join([piece.text for piece in pieces]))
