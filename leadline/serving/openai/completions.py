"""``POST /v1/completions``: raw prompts, text as generated (serving-api 6)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from leadline.core.request import EngineRequest, TokenOutput
from leadline.core.streams import merge
from leadline.serving.body import decode_body
from leadline.serving.context import Caller, Server
from leadline.serving.endpoint import respond
from leadline.serving.events import BLANK, event, event_template, json_line
from leadline.serving.generation import Step, read_choice, shown_entries
from leadline.serving.openai.answers import FINGERPRINT, Completion, CompletionChoice, Usage
from leadline.serving.openai.completion_prompts import completion_requests
from leadline.serving.openai.logprobs import CompletionLogprobs, LogprobWriter
from leadline.serving.openai.schema import CompletionRequest
from leadline.serving.usage import UsageMeter
from leadline.text.detokenizer import TextOutput
from leadline.text.tokenizer import Tokenizer


async def completions(http: Request) -> Response:
    """Continue raw prompts, whole or as a stream."""
    return await respond(http, CompletionAnswer)


class _Choice:
    """One choice while it runs."""

    def __init__(
        self, tokenizer: Tokenizer, body: CompletionRequest, request: EngineRequest, index: int
    ) -> None:
        self.index = index
        self.request = request
        self.has_started = False
        self.reader = TextOutput(tokenizer, request.sampling)
        self._body = body
        self._tokenizer = tokenizer
        self._writer = LogprobWriter(tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._text_offset = 0

    def prologue(self, output: TokenOutput) -> CompletionChoice:
        """What comes before the answer: the echoed prompt, and what was asked of its tokens."""
        part = CompletionChoice(self.index, "")
        ids, entries = self.request.prompt_token_ids, output.prompt_logprobs
        if self._body.echo:
            hidden = self._tokenizer.special_ids
            part.text = self._tokenizer.decode([i for i in ids if i not in hidden])
            if self._body.logprobs is not None:
                part.logprobs = self._writer.completion(ids, entries, offset=0, hidden=hidden)
            self._text_offset = len(part.text)
        if self._body.prompt_logprobs is not None:
            part.prompt_logprobs = self._writer.prompt(entries)
        if self._body.return_token_ids:
            part.prompt_token_ids = ids
        return part

    def part(self, step: Step[str]) -> CompletionChoice:
        """What a step adds to the choice."""
        part = CompletionChoice(
            self.index, step.piece, self._logprobs(step), finish_reason=step.finish_reason
        )
        if step.finish_reason is not None:
            part.stop_reason = self.reader.stop_reason
        if self._body.return_token_ids:
            part.token_ids = list(step.output.token_ids[: step.num_tokens])
        return part

    def _logprobs(self, step: Step[str]) -> CompletionLogprobs | None:
        if self._body.logprobs is None or not step.num_tokens:
            return None
        entries = shown_entries(
            step.output, step.num_tokens, self.request.sampling, self._tokenizer
        )
        ids = [entry.token_id for entry in entries]
        logprobs = self._writer.completion(ids, entries, offset=self._text_offset)
        self._text_offset += sum(len(self._tokenizer.decode((i,))) for i in ids)
        return logprobs


class CompletionAnswer:
    """The answer to one request; choices are numbered prompt by prompt.

    Raises:
        BadRequest: the body cannot be served as it stands.
    """

    def __init__(self, server: Server, raw: bytes, caller: Caller) -> None:
        body = decode_body(raw, CompletionRequest)
        self._body = body
        self._config = server.config.chat
        self._model = server.resolve_model(body.model)
        requests = completion_requests(server, body, caller)
        self.is_stream = bool(body.stream)
        self._id = f"cmpl-{body.request_id or requests[0].request_id}"
        self._created = int(time.time())
        self._meter = UsageMeter()
        self._n = requests[0].sampling.n
        self._choices: list[_Choice] = []
        for request in requests:
            for own in request.choices():
                self._choices.append(_Choice(server.tokenizer, body, own, len(self._choices)))
        self._streams = [
            read_choice(server, choice.request, choice.reader, caller.request_id)
            for choice in self._choices
        ]
        server.metrics.params_n.observe(self._n)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one for each part that a client can see."""
        counts_on = self._body.continuous_usage
        has_usage = self._body.include_usage or self._config.enable_force_include_usage
        usage: Usage | UnsetType | None = None if has_usage else UNSET
        writer = _PartWriter(self._completion([], usage))
        interval = self._body.stream_interval or self._config.stream_interval
        async with aclosing(_batched(self._parts(), interval)) as parts:
            async for part in parts:
                is_last = part.finish_reason is not None
                if counts_on or (is_last and self._config.usage_in_final_chunk):
                    yield event(self._completion([part], self._usage()))
                else:
                    yield writer.event(part)
        if has_usage:
            yield event(self._completion([], self._usage()))

    async def whole(self) -> Completion:
        """The same parts, joined."""
        choices = [CompletionChoice(choice.index, "") for choice in self._choices]
        async with aclosing(self._parts()) as parts:
            async for part, _ in parts:
                choices[part.index].extend(part)
        return self._completion(choices, self._usage())

    async def _parts(self) -> AsyncGenerator[tuple[CompletionChoice, int], None]:
        """Parts of the choices as they come, with the number of tokens in each."""
        async with aclosing(merge(self._streams)) as steps:
            async for index, step in steps:
                choice = self._choices[index]
                if choice.has_started:
                    part = choice.part(step)
                else:
                    choice.has_started = True
                    if index % self._n == 0:
                        self._meter.admit(step.output, len(choice.request.prompt_token_ids))
                    part = choice.prologue(step.output)
                    part.extend(choice.part(step))
                yield part, step.num_tokens

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(self._id, self._created, self._model, FINGERPRINT, choices, usage=usage)

    def _usage(self) -> Usage:
        return Usage.of(self._meter.counts(sum(c.reader.num_tokens for c in self._choices)))


class _PartWriter:
    """Events of parts; one that is only text fills a template."""

    def __init__(self, frame: Completion) -> None:
        self._frame = frame
        self._templates: dict[int, bytes] = {}

    def event(self, part: CompletionChoice) -> bytes:
        if part.logprobs is None and part.token_ids is UNSET and part.finish_reason is None:
            if part.index not in self._templates:
                self._frame.choices = [CompletionChoice(part.index, BLANK)]
                self._templates[part.index] = event_template(self._frame)
            return self._templates[part.index] % json_line(part.text)
        self._frame.choices = [part]
        return event(self._frame)


async def _batched(
    parts: AsyncGenerator[tuple[CompletionChoice, int], None], interval: int
) -> AsyncGenerator[CompletionChoice, None]:
    """Parts of ``interval`` tokens that have a text; the first and the last come at once."""
    held: dict[int, CompletionChoice] = {}
    num_held: dict[int, int] = {}
    async with aclosing(parts):
        async for part, num_tokens in parts:
            index = part.index
            if index in held:
                held[index].extend(part)
            else:
                held[index] = part
            num_held[index] = num_held.get(index, interval) + num_tokens
            is_due = num_held[index] >= interval and held[index].text
            if is_due or part.finish_reason is not None:
                num_held[index] = 0
                yield held.pop(index)
