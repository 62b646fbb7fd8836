"""Output tokens of a chat -> reasoning, content and tool calls, as ``deepseek-recipe`` splits them.

The library decides what a token belongs to. Beyond it: stop strings in content only, the end of
the text made byte-exact, tool calls withheld from clients that declared no tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import deepseek_recipe as recipe
import msgspec

from leadline.core.request import FinishReason, SamplingParams, TokenOutput
from leadline.text.detokenizer import StopStrings, shown_token_ids, stop_token
from leadline.text.encoding import SPECIAL_TOKENS, THINK_END, ChatEncoder, ChatPrompt


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """Name (in a call's first delta) and a fragment of the arguments."""

    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """A piece of one tool call; id and type come with the first."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    """One piece of an answer; exactly one field is set."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class _Choice(msgspec.Struct):
    delta: Delta
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    """The parts of the library's chunk that we read."""

    choices: list[_Choice]


class _Event(Protocol):
    """What the library's stream yields."""

    def to_json(self) -> str: ...


_CHUNK = msgspec.json.Decoder(_Chunk)


class OutputParser:
    """Engine outputs of one choice -> deltas (serving-api 3).

    Attributes:
        num_tokens: tokens generated so far, up to and with the one that completed a stop string.
        num_reasoning_tokens: those before the end of reasoning; the library's own count comes
            from encoding the text once more, which need not give the tokens that were generated.
        finish_reason: ``stop``, ``length`` or ``tool_calls``; None while the choice runs. A stop
            string sets it before the engine does: the caller then closes its stream of outputs.
        stop_reason: the stop string or stop token id that ended the choice, or None.
    """

    def __init__(
        self,
        encoder: ChatEncoder,
        prompt: ChatPrompt,
        sampling: SamplingParams,
        *,
        parallel_tool_calls: bool = True,
    ) -> None:
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._tokenizer = encoder.tokenizer
        self._eos = encoder.tokenizer.eos_token_id
        self._think_end = encoder.tokenizer.marker_id(THINK_END)
        self._sampling = sampling
        self._has_tools = prompt.has_tools
        self._max_calls = 2**31 if parallel_tool_calls else 1
        self._stop = StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
        self._undecoded = b""
        options = prompt.request.parsing_options
        stage = options.thinking_initial_stage
        self._is_reasoning = stage is not None and stage.starts_in_reasoning()
        # Without tools the markup is still recognised, so that it can be withheld (3.7).
        options.parse_tool_calls = True
        options.special_tokens = SPECIAL_TOKENS
        generator = recipe.ChatCompletionRequest.chunk_generator(prompt.request, "", "")
        self._stream = recipe.StreamProcessor(generator, options, encoder.recipe_tokenizer)
        self._stream.push(recipe.InferenceChunk.ready())

    def push(self, output: TokenOutput) -> list[Delta]:
        """The deltas that ``output`` releases; the whole rest when it ends the request."""
        deltas: list[Delta] = []
        shown = shown_token_ids(output, self._sampling, eos=self._eos)
        for token_id in shown:
            self.num_tokens += 1
            if self._is_reasoning:
                self._is_reasoning = token_id != self._think_end
                self.num_reasoning_tokens += self._is_reasoning
            if token_id != self._eos:  # the library would show it as text
                self._take(self._stream.push(recipe.InferenceChunk.tokens((token_id,))), deltas)
                self._track_undecoded(token_id)
            if self._stop.matched is not None:
                self.stop_reason = self._stop.matched
                self._end(FinishReason.STOP, [])
                return deltas
        self.num_tokens += len(output.token_ids) - len(shown)
        if output.finish_reason is not None:
            self.stop_reason = stop_token(output, eos=self._eos)
            self._end(output.finish_reason, deltas)
        return deltas

    def _take(self, events: Sequence[_Event], deltas: list[Delta]) -> None:
        for event in events:
            delta = _CHUNK.decode(event.to_json()).choices[0].delta
            if delta.content is not None:
                self._append_content(delta.content, deltas)
                continue
            if held := self._stop.finish():  # content is over: it was no stop string
                deltas.append(Delta(content=held))
            if delta.tool_calls is not None:
                self._is_reasoning = False  # a call may come without the marker
                if not self._is_wanted(delta.tool_calls[0]):
                    continue
            deltas.append(delta)

    def _append_content(self, text: str, deltas: list[Delta]) -> None:
        # Stop strings are not honoured before min_tokens (serving-api 9.1).
        if self.num_tokens > self._sampling.min_tokens:
            text = self._stop.push(text)
        if text:
            deltas.append(Delta(content=text))

    def _is_wanted(self, call: ToolCallDelta) -> bool:
        return self._has_tools and call.index < self._max_calls

    def _track_undecoded(self, token_id: int) -> None:
        """Mirror the bytes that the library's decoder still holds back.

        It releases text only when that does not end in U+FFFD, and forgets the rest at the end.
        """
        self._undecoded += self._tokenizer.token_bytes((token_id,))
        # The last four bytes hold the last character, whatever precedes them.
        if not self._undecoded[-4:].decode("utf-8", "replace").endswith("\ufffd"):
            self._undecoded = b""

    def _end(self, reason: FinishReason, deltas: list[Delta]) -> None:
        """Append what was held back, and ask the library how the turn ended."""
        if self._undecoded:  # an unfinished character becomes U+FFFD (C2)
            text = self._undecoded.decode("utf-8", "replace")
            self._take(self._stream.push(recipe.InferenceChunk.text(text)), deltas)
        ending = recipe.InferenceFinishReason.Stop
        if reason is FinishReason.LENGTH:
            ending = recipe.InferenceFinishReason.Length
        *held, last = self._stream.push(recipe.InferenceChunk.finish(ending))
        self._take(held, deltas)
        if rest := self._stop.finish():
            deltas.append(Delta(content=rest))
        self.finish_reason = _CHUNK.decode(last.to_json()).choices[0].finish_reason
        if self.finish_reason == "tool_calls" and not self._has_tools:
            self.finish_reason = "stop"
