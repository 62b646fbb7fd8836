"""A chat in any dialect: from what a client asks to what its choices say.

A dialect turns its body into a ``ChatQuery`` and the steps of a ``ChatRun`` into its own events;
everything between is here, once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from leadline.core.request import (
    EngineRequest,
    SamplingParams,
    StructuredOutputs,
    TokenLogprobs,
    TokenOutput,
)
from leadline.serving.context import Caller, Server
from leadline.serving.generation import choice_requests, merge, read_choice
from leadline.serving.logprobs import shown_entries
from leadline.serving.origin import Origin
from leadline.serving.sampling import (
    default_chat_limit,
    kept_tokens,
    output_limit,
    sampling_params,
    thinking_policy,
)
from leadline.serving.usage import TokenCounts, UsageMeter
from leadline.text import grammar
from leadline.text.chat import CallArguments, ChatInput, ChatPrompt, Content, Delta, Reasoning
from leadline.text.output_parser import OutputParser, ParserOptions
from leadline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatQuery:
    """What a client asks, whatever the dialect.

    Attributes:
        model: the name as sent.
        sampling: the ``SamplingParams`` fields that the request gives, but for ``max_tokens``.
        max_tokens: None takes the server's default.
        limit_field: what the dialect calls ``max_tokens``.
        may_refuse_limit: whether ``--strict-max-tokens`` holds; else a limit is always lowered.
        input_field: what it calls the messages.
        truncate_prompt_tokens: only the last tokens of the prompt are kept; -1 is what fits.
    """

    model: str | None
    chat: ChatInput
    origin: Origin
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    limit_field: str = "max_tokens"
    may_refuse_limit: bool = True
    input_field: str = "messages"
    structured: StructuredOutputs | None = None
    truncate_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A query that was checked and encoded: all that can be a client's mistake is behind it.

    Attributes:
        model: the name to echo.
        request: what every choice submits, but for its id and its seed.
    """

    model: str
    prompt: ChatPrompt
    request: EngineRequest

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling


def encode_query(server: Server, query: ChatQuery, caller: Caller) -> tuple[str, ChatPrompt]:
    """The model's name to echo, and the prompt of any length.

    Raises:
        BadRequest: the model is unknown, or the chat cannot be rendered.
    """
    model = server.resolve_model(query.model)
    chat = query.chat
    if chat.thinking is None and chat.reasoning_effort != "none":
        chat = replace(chat, thinking=_alias_thinking(server, model))
    return model, server.encoder.encode(chat, tenant=query.origin.salt(caller))


def _alias_thinking(server: Server, name: str) -> bool | None:
    """The mode that an alias such as ``deepseek-chat`` stands for (serving-api 4)."""
    aliases = {alias.partition("=")[0] for alias in server.config.model_alias}
    if name in aliases and name.endswith(("-chat", "-reasoner")):
        return name.endswith("-reasoner")
    return None


def prepare_chat(server: Server, query: ChatQuery, caller: Caller) -> ChatCall:
    """Check and encode a query.

    Raises:
        BadRequest: it cannot be served as it stands.
    """
    config = server.config.chat
    model, prompt = encode_query(server, query, caller)
    if query.truncate_prompt_tokens is not None:
        kept = kept_tokens(server, query.truncate_prompt_tokens, query.max_tokens)
        prompt = replace(prompt, token_ids=prompt.token_ids[-kept:])
    server.check_prompt(len(prompt.token_ids), param=query.input_field)
    max_tokens = output_limit(
        server,
        len(prompt.token_ids),
        query.max_tokens,
        default=default_chat_limit(server, prompt),
        is_strict=config.strict_max_tokens and query.may_refuse_limit,
        param=query.limit_field,
    )
    profile = server.encoder.profile
    is_v4 = not profile.has_system_marker
    given = thinking_policy(query.sampling, prompt, config, is_v4=is_v4)
    given["structured_outputs"] = query.structured
    sampling = sampling_params(server, given, max_tokens=max_tokens)
    tokenizer = server.tokenizer
    request = query.origin.engine_request(
        caller,
        prompt.token_ids,
        sampling,
        constraint=grammar.chat_constraint(
            prompt,
            tokenizer,
            query.structured,
            strict_level=config.tool_strict_level,
            tags=profile.tags,
        ),
        bad_token_ids=grammar.bad_token_ids(sampling.bad_words, tokenizer),
        thinking_budget=grammar.thinking_budget(sampling, prompt, tokenizer),
    )
    return ChatCall(model, prompt, request)


class ChoiceRun:
    """One choice while it runs.

    Attributes:
        parser: says how the choice ended, once it has.
        token_ids: generated ones since the last ``take_token_ids``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        call: ChatCall,
        request: EngineRequest,
        index: int,
        options: ParserOptions,
    ) -> None:
        self.index = index
        self.request = request
        self.parser = OutputParser(tokenizer, call.prompt, request.sampling, options=options)
        self._tokenizer = tokenizer
        self._entries: list[TokenLogprobs] = []
        self._token_ids: list[int] = []

    def note(self, output: TokenOutput, num_tokens: int) -> None:
        """Keep what the first ``num_tokens`` of an output say beside their text."""
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
    """

    def __init__(
        self,
        server: Server,
        call: ChatCall,
        log_id: str,
        *,
        interval: int = 1,
        shows_reasoning: bool = True,
    ) -> None:
        self.call = call
        self._server = server
        self._interval = interval
        self._shows_reasoning = shows_reasoning
        self._meter = UsageMeter()
        config = server.config.chat
        options = ParserOptions(coerces=config.tool_arg_coercion, raw_markup=config.raw_markup)
        self.choices = [
            ChoiceRun(server.tokenizer, call, request, i, options)
            for i, request in enumerate(choice_requests(call.request))
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
