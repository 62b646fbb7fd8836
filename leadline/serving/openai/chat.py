"""``POST /v1/chat/completions`` (serving-api 5)."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from leadline.core.errors import BadRequest
from leadline.core.request import EngineRequest, SamplingParams, TokenLogprobs
from leadline.serving.body import decode_body
from leadline.serving.context import Caller, Server
from leadline.serving.dialect import event
from leadline.serving.generation import Step, choice_requests, merge, read_choice
from leadline.serving.openai.answers import (
    FINGERPRINT,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Function,
    ToolCall,
    Usage,
    UsageMeter,
)
from leadline.serving.openai.endpoint import respond
from leadline.serving.openai.logprobs import chat_entry, shown_entries
from leadline.serving.openai.schema import ChatRequest
from leadline.text.encoding import ChatPrompt
from leadline.text.output_parser import Delta, OutputParser, ToolCallDelta

_MAX_TOP_LOGPROBS = 20


async def chat_completions(http: Request) -> Response:
    """Answer a chat, whole or as a stream."""
    return await respond(http, ChatCall.parse, ChatAnswer)


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A request that was checked and encoded: all that can be a client's mistake is behind it."""

    body: ChatRequest
    model: str
    prompt: ChatPrompt
    sampling: SamplingParams
    session_key: str | None

    @classmethod
    def parse(cls, server: Server, raw: bytes, caller: Caller) -> ChatCall:
        """Check and encode a body.

        Raises:
            BadRequest: it cannot be served as it stands.
        """
        body = decode_body(raw, ChatRequest)
        model = server.resolve_model(body.model)
        body.refuse_missing_features()
        body.check_cache_salt()
        if body.continue_final_message and body.add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        effort = body.reasoning_effort
        if effort is None and body.reasoning is not None:
            effort = body.reasoning.get("effort")
        prompt = server.encoder.encode(
            body.messages,
            tools=body.active_tools(),
            thinking=body.thinking,
            reasoning_effort=effort,
            chat_template_kwargs=body.chat_template_kwargs,
            continue_final_message=bool(body.continue_final_message),
        )
        server.check_prompt(len(prompt.token_ids), param="messages")
        sampling = body.sampling(
            max_tokens=_max_tokens(server, body, prompt),
            logprobs=_logprobs(body),
            vocab_size=server.model.vocab_size,
        )
        session_key = caller.session_key(
            session_id=body.session_id, prompt_cache_key=body.prompt_cache_key
        )
        return cls(body, model, prompt, sampling, session_key)


def _max_tokens(server: Server, body: ChatRequest, prompt: ChatPrompt) -> int:
    """The output limit: the client's or 5.1's, lowered to what is left of the context (C27)."""
    limit = body.max_completion_tokens
    if limit is None:
        limit = body.max_tokens
    if limit is None:
        return prompt.default_max_tokens(server.model.max_model_len)
    if limit < 1:
        raise BadRequest(f"max_tokens is {limit}; it must be at least 1", param="max_tokens")
    return min(limit, server.model.max_model_len - len(prompt.token_ids))


def _logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs or 0
    if not 0 <= top <= _MAX_TOP_LOGPROBS:
        raise BadRequest(
            f"top_logprobs is {top}; it must lie in 0..{_MAX_TOP_LOGPROBS}", param="top_logprobs"
        )
    if top and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return top if body.logprobs else None


class _Choice:
    """One choice while it runs, and all that it said so far."""

    def __init__(self, server: Server, call: ChatCall, request: EngineRequest, index: int) -> None:
        self.index = index
        self.request = request
        self.parser = OutputParser(
            server.encoder,
            call.prompt,
            call.sampling,
            parallel_tool_calls=call.body.parallel_tool_calls is not False,
        )
        self.started = False
        self._tokenizer = server.tokenizer
        self._entries: list[TokenLogprobs] = []

    def note_logprobs(self, step: Step[list[Delta]]) -> None:
        """Keep the entries of a step's tokens."""
        self._entries += shown_entries(
            step.output, step.num_tokens, self.request.sampling, self._tokenizer
        )

    def take_logprobs(self) -> ChatLogprobs | None:
        """Entries since the last call: a token that was held back keeps its entry until then."""
        if not self._entries:
            return None
        entries, self._entries = self._entries, []
        return ChatLogprobs([chat_entry(entry, self._tokenizer) for entry in entries])


class ChatAnswer:
    """The answer to one call, as a stream or whole."""

    def __init__(self, server: Server, call: ChatCall, log_id: str) -> None:
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._call = call
        self._meter = UsageMeter()
        requests = choice_requests(
            self._id,
            call.prompt.token_ids,
            call.sampling,
            session_key=call.session_key,
            cache_salt=call.body.cache_salt,
        )
        self._choices = [_Choice(server, call, r, i) for i, r in enumerate(requests)]
        self._streams = [
            read_choice(server, choice.request, choice.parser, log_id) for choice in self._choices
        ]
        server.metrics.params_n.observe(call.sampling.n)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; one item holds what one output of the engine gave."""
        async with aclosing(self._outputs()) as outputs:
            async for choice, deltas, finish_reason in outputs:
                data = b""
                if not choice.started:
                    choice.started = True
                    data = self._event(choice, ChatDelta(role="assistant", content=""), None)
                for delta in deltas:
                    data += self._event(choice, _wire(delta), choice.take_logprobs())
                if finish_reason is not None:
                    data += self._event(choice, ChatDelta(), choice.take_logprobs(), last=True)
                if data:
                    yield data
        if self._call.body.include_usage:
            yield event(self._chunk([], self._usage()))

    async def whole(self) -> ChatCompletion:
        """The same deltas, joined."""
        messages = [_MessageBuilder() for _ in self._choices]
        async with aclosing(self._outputs()) as outputs:
            async for choice, deltas, _ in outputs:
                for delta in deltas:
                    messages[choice.index].add(delta)
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._call.model,
            system_fingerprint=FINGERPRINT,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=message.build(),
                    logprobs=choice.take_logprobs(),
                    finish_reason=choice.parser.finish_reason or "",
                    stop_reason=choice.parser.stop_reason,
                )
                for choice, message in zip(self._choices, messages, strict=True)
            ],
            usage=self._usage(),
        )

    async def _outputs(self) -> AsyncGenerator[tuple[_Choice, list[Delta], str | None], None]:
        """What the choices say, as they say it, and how each ends."""
        hides_reasoning = self._call.body.include_reasoning is False
        is_admitted = False
        async with aclosing(merge(self._streams)) as steps:
            async for index, step in steps:
                if not is_admitted:
                    is_admitted = True
                    self._meter.admit(step.output, len(self._call.prompt.token_ids))
                choice, deltas = self._choices[index], step.piece
                if step.output.logprobs:
                    choice.note_logprobs(step)
                if hides_reasoning:
                    deltas = [delta for delta in deltas if delta.reasoning_content is None]
                yield choice, deltas, step.finish_reason

    def _event(
        self,
        choice: _Choice,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None,
        *,
        last: bool = False,
    ) -> bytes:
        part = ChatChunkChoice(choice.index, delta, logprobs)
        if last:
            part.finish_reason = choice.parser.finish_reason
            part.stop_reason = choice.parser.stop_reason
        usage: Usage | UnsetType | None = None if self._call.body.include_usage else UNSET
        if self._call.body.continuous_usage:
            usage = self._usage()
        return event(self._chunk([part], usage))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            self._id, self._created, self._call.model, FINGERPRINT, choices, usage=usage
        )

    def _usage(self) -> Usage:
        parsers = [choice.parser for choice in self._choices]
        return self._meter.usage(
            sum(parser.num_tokens for parser in parsers),
            sum(parser.num_reasoning_tokens for parser in parsers),
        )


def _wire(delta: Delta) -> ChatDelta:
    reasoning = delta.reasoning_content
    return ChatDelta(None, delta.content, reasoning, reasoning, delta.tool_calls)


class _MessageBuilder:
    """Joins the deltas of one choice."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []

    def add(self, delta: Delta) -> None:
        if delta.content is not None:
            self._content.append(delta.content)
        elif delta.reasoning_content is not None:
            self._reasoning.append(delta.reasoning_content)
        for call in delta.tool_calls or ():
            if call.id is not None:
                self._calls.append((call, []))
            self._calls[-1][1].append(call.function.arguments)

    def build(self) -> ChatMessage:
        """The message; keys that do not apply are absent."""
        content = "".join(self._content)
        reasoning = "".join(self._reasoning) or UNSET
        calls = [
            ToolCall(first.id or "", Function(first.function.name or "", "".join(arguments)))
            for first, arguments in self._calls
        ]
        return ChatMessage(
            content=None if calls and not content else content,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls or UNSET,
        )
