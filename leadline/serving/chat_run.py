"""A chat while it runs: its choices, what they say next, what they cost (serving-api 10)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from leadline.core.request import EngineRequest, TokenLogprobs, TokenOutput
from leadline.core.streams import merge
from leadline.serving.chat_call import ChatCall
from leadline.serving.context import Server
from leadline.serving.generation import read_choice, shown_entries
from leadline.serving.usage import TokenCounts, UsageMeter
from leadline.text.chat import CallArguments, Content, Delta, Reasoning
from leadline.text.output_parser import OutputParser, ParserOptions
from leadline.text.tokenizer import Tokenizer


class ChoiceRun:
    """One choice while it runs.

    Attributes:
        parser: says how the choice ended, once it has.
        keeps_ids: whether ``take_token_ids`` has something to take.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        call: ChatCall,
        request: EngineRequest,
        index: int,
        options: ParserOptions,
        *,
        keeps_ids: bool,
    ) -> None:
        self.index = index
        self.keeps_ids = keeps_ids
        self.request = request
        self.parser = OutputParser(tokenizer, call.prompt, request.sampling, options=options)
        self._tokenizer = tokenizer
        self._entries: list[TokenLogprobs] = []
        self._token_ids: list[int] = []

    def note(self, output: TokenOutput, num_tokens: int) -> None:
        """Keep what the first ``num_tokens`` of an output say beside their text."""
        if self.keeps_ids:
            self._token_ids += output.token_ids[:num_tokens]
        if output.logprobs:
            self._entries += shown_entries(
                output, num_tokens, self.request.sampling, self._tokenizer
            )

    def take_entries(self) -> list[TokenLogprobs]:
        """Log-probabilities since the last call: a token held back keeps its entry until then."""
        entries, self._entries = self._entries, []
        return entries

    def take_token_ids(self) -> list[int]:
        """Generated ids since the last call."""
        token_ids, self._token_ids = self._token_ids, []
        return token_ids


class ChatStep(NamedTuple):
    """What one choice says next.

    Attributes:
        output: the engine's, the last one of those that the step stands for.
        finish_reason: set with the last step of a choice.
    """

    choice: ChoiceRun
    output: TokenOutput
    deltas: list[Delta]
    finish_reason: str | None


class ChatRun:
    """All choices of one call, which begin when ``steps`` is read.

    Args:
        server: whose engine runs them.
        call: the checked request.
        log_id: the id of the HTTP request.
        interval: tokens of a choice that make a step; the first and the last come at once.
        shows_reasoning: whether steps have the reasoning's text.
        keeps_ids: whether generated ids are kept for ``take_token_ids``.
    """

    def __init__(
        self,
        server: Server,
        call: ChatCall,
        log_id: str,
        *,
        interval: int = 1,
        shows_reasoning: bool = True,
        keeps_ids: bool = False,
    ) -> None:
        self.call = call
        self._server = server
        self._interval = interval
        self._shows_reasoning = shows_reasoning
        self._meter = UsageMeter()
        config = server.config.chat
        options = ParserOptions(coerces=config.tool_arg_coercion, raw_markup=config.raw_markup)
        self.choices = [
            ChoiceRun(server.tokenizer, call, request, i, options, keeps_ids=keeps_ids)
            for i, request in enumerate(call.request.choices())
        ]
        self._streams = [
            read_choice(server, choice.request, choice.parser, log_id) for choice in self.choices
        ]
        server.metrics.params_n.observe(call.sampling.n)

    async def steps(self) -> AsyncGenerator[ChatStep, None]:
        """What the choices say, as they say it, and how each ends."""
        is_admitted = False
        held: dict[int, _Held] = {}
        async with aclosing(merge(self._streams)) as steps:
            async for index, step in steps:
                if not is_admitted:
                    is_admitted = True
                    self._meter.admit(step.output, len(self.call.prompt.token_ids))
                choice, deltas = self.choices[index], step.piece
                choice.note(step.output, step.num_tokens)
                if step.finish_reason is not None:
                    self._remember(choice)
                    self._server.metrics.count_faults(choice.parser.faults.elements())
                if not self._shows_reasoning:
                    deltas = [delta for delta in deltas if not isinstance(delta, Reasoning)]
                if self._interval > 1:
                    waiting = held.setdefault(index, _Held(self._interval))
                    waiting.add(deltas, step.num_tokens)
                    if not waiting.is_due and step.finish_reason is None:
                        continue
                    deltas = waiting.take()
                yield ChatStep(choice, step.output, deltas, step.finish_reason)

    def counts(self) -> TokenCounts:
        """Tokens so far, of all choices together."""
        parsers = [choice.parser for choice in self.choices]
        return self._meter.counts(
            sum(parser.num_tokens for parser in parsers),
            sum(parser.num_reasoning_tokens for parser in parsers),
        )

    def _remember(self, choice: ChoiceRun) -> None:
        """Keep a turn with calls as it was sampled, for when it comes back (C12)."""
        turn = choice.parser.sampled_turn()
        if turn is not None:
            self._server.encoder.remember(
                turn, self.call.request.cache_salt, start=self.call.prompt.start
            )


class _Held:
    """Deltas of one choice that wait for ``interval`` tokens."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._num_tokens = interval  # the first token does not wait
        self._deltas: list[Delta] = []

    @property
    def is_due(self) -> bool:
        return self._num_tokens >= self._interval

    def add(self, deltas: list[Delta], num_tokens: int) -> None:
        self._num_tokens += num_tokens
        for delta in deltas:
            if self._deltas and (longer := _joined(self._deltas[-1], delta)) is not None:
                self._deltas[-1] = longer
            else:
                self._deltas.append(delta)

    def take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        self._num_tokens = 0
        return deltas


def _joined(first: Delta, second: Delta) -> Delta | None:
    """Two pieces of the same thing as one; None when they belong to different ones."""
    match first, second:
        case Content(a), Content(b):
            return Content(a + b)
        case Reasoning(a), Reasoning(b):
            return Reasoning(a + b)
        case CallArguments(i, a), CallArguments(j, b) if i == j:
            return CallArguments(i, a + b)
    return None
