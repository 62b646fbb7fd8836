"""``POST /v1/completions``: raw prompts, text as generated (serving-api 6)."""

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
from leadline.core.request import EngineRequest, SamplingParams
from leadline.serving.body import decode_body
from leadline.serving.context import Caller, Server
from leadline.serving.dialect import event
from leadline.serving.generation import Step, choice_requests, merge, read_choice
from leadline.serving.openai.answers import (
    FINGERPRINT,
    Completion,
    CompletionChoice,
    Usage,
    UsageMeter,
)
from leadline.serving.openai.endpoint import respond
from leadline.serving.openai.logprobs import completion_logprobs, shown_entries
from leadline.serving.openai.schema import CompletionRequest
from leadline.text.detokenizer import TextOutput
from leadline.text.tokenizer import FIM_BEGIN, FIM_END, FIM_HOLE

_MAX_PROMPTS = 1024
_MAX_LOGPROBS = 20
_DEFAULT_MAX_TOKENS = 16


async def completions(http: Request) -> Response:
    """Continue raw prompts, whole or as a stream."""
    return await respond(http, CompletionCall.parse, CompletionAnswer)


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A request that was checked and encoded.

    Attributes:
        prompts: ids of each prompt, and the sampling with its own ``max_tokens``.
    """

    body: CompletionRequest
    model: str
    prompts: list[tuple[list[int], SamplingParams]]
    session_key: str | None

    @classmethod
    def parse(cls, server: Server, raw: bytes, caller: Caller) -> CompletionCall:
        """Check and encode a body.

        Raises:
            BadRequest: it cannot be served as it stands.
        """
        body = decode_body(raw, CompletionRequest)
        model = server.resolve_model(body.model)
        body.refuse_missing_features()
        body.check_cache_salt()
        if body.best_of is not None and body.best_of > (body.n or 1):
            raise BadRequest(
                f"best_of is {body.best_of}; more choices than n ({body.n or 1}) are not ranked",
                param="best_of",
            )
        if body.logprobs is not None and not 0 <= body.logprobs <= _MAX_LOGPROBS:
            raise BadRequest(
                f"logprobs is {body.logprobs}; it must lie in 0..{_MAX_LOGPROBS}", param="logprobs"
            )
        if body.echo and body.logprobs is not None:
            raise BadRequest(
                "echo with logprobs: log-probabilities of prompt tokens do not exist yet",
                param="echo",
                code="not_supported",
            )
        limit = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if limit < 1:
            raise BadRequest(f"max_tokens is {limit}; it must be at least 1", param="max_tokens")
        prompts = []
        for token_ids in _prompts(body, server):
            server.check_prompt(len(token_ids), param="prompt")
            sampling = body.sampling(
                max_tokens=min(limit, server.model.max_model_len - len(token_ids)),
                logprobs=body.logprobs,
                vocab_size=server.model.vocab_size,
            )
            prompts.append((token_ids, sampling))
        return cls(
            body,
            model,
            prompts,
            caller.session_key(session_id=body.session_id, prompt_cache_key=body.prompt_cache_key),
        )


def _prompts(body: CompletionRequest, server: Server) -> list[list[int]]:
    """Ids of every prompt: a string, strings, ids, or lists of ids."""
    given = body.prompt
    if isinstance(given, str):
        prompts: list[str | list[int]] = [given]
    elif given and all(isinstance(item, int) for item in given):
        prompts = [[item for item in given if isinstance(item, int)]]
    else:
        prompts = [item for item in given if not isinstance(item, int)]
        if len(prompts) < len(given):
            raise BadRequest("prompt mixes ids with other items", param="prompt")
    if not 1 <= len(prompts) <= _MAX_PROMPTS:
        raise BadRequest(
            f"prompt holds {len(prompts)} prompts; it must be 1 to {_MAX_PROMPTS}", param="prompt"
        )
    return [_prompt_ids(prompt, body, server) for prompt in prompts]


def _prompt_ids(prompt: str | list[int], body: CompletionRequest, server: Server) -> list[int]:
    if not prompt:
        raise BadRequest("prompt is empty; it needs at least one token", param="prompt")
    if isinstance(prompt, list):
        for token_id in prompt:
            if not 0 <= token_id < server.model.vocab_size:
                raise BadRequest(
                    f"prompt has id {token_id}, outside the vocabulary of "
                    f"{server.model.vocab_size}",
                    param="prompt",
                )
        return prompt
    tokenizer = server.tokenizer
    if body.suffix is not None:
        if not tokenizer.has_markers(FIM_BEGIN, FIM_HOLE, FIM_END):
            raise BadRequest(
                "suffix: the tokenizer has no fill-in-the-middle markers",
                param="suffix",
                code="not_supported",
            )
        prompt = f"{FIM_BEGIN}{prompt}{FIM_HOLE}{body.suffix}{FIM_END}"
    encode = tokenizer.encode if body.add_special_tokens is False else tokenizer.encode_prompt
    return encode(prompt)


class _Choice:
    """One choice while it runs."""

    def __init__(self, server: Server, request: EngineRequest, index: int) -> None:
        self.index = index
        self.request = request
        self.reader = TextOutput(server.tokenizer, request.sampling)
        self.started = False
        self._tokenizer = server.tokenizer
        self._text_offset = 0

    def part(self, step: Step[str]) -> CompletionChoice:
        """What a step adds to the choice."""
        logprobs = None
        if step.output.logprobs:
            entries = shown_entries(
                step.output, step.num_tokens, self.request.sampling, self._tokenizer
            )
            logprobs = completion_logprobs(entries, self._tokenizer, text_offset=self._text_offset)
            self._text_offset += sum(map(len, logprobs.tokens))
        stop_reason = None if step.finish_reason is None else self.reader.stop_reason
        return CompletionChoice(self.index, step.piece, logprobs, step.finish_reason, stop_reason)

    def echo(self) -> CompletionChoice:
        """The prompt as the beginning of the answer."""
        ids = self.request.prompt_token_ids
        shown = [token_id for token_id in ids if token_id not in self._tokenizer.special_ids]
        return CompletionChoice(self.index, self._tokenizer.decode(shown))


class CompletionAnswer:
    """The answer to one call, as a stream or whole; choices are numbered prompt by prompt."""

    def __init__(self, server: Server, call: CompletionCall, log_id: str) -> None:
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._call = call
        self._meter = UsageMeter()
        self._n = call.prompts[0][1].n
        self._choices: list[_Choice] = []
        for token_ids, sampling in call.prompts:
            first = len(self._choices)
            for request in choice_requests(
                self._id,
                token_ids,
                sampling,
                first=first,
                session_key=call.session_key,
                cache_salt=call.body.cache_salt,
            ):
                self._choices.append(_Choice(server, request, len(self._choices)))
        self._streams = [
            read_choice(server, choice.request, choice.reader, log_id) for choice in self._choices
        ]
        server.metrics.params_n.observe(self._n)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; one item holds what one output of the engine gave."""
        usage: Usage | UnsetType | None = None if self._call.body.include_usage else UNSET
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                if self._call.body.continuous_usage:
                    usage = self._usage()
                if part.text or part.finish_reason is not None:
                    yield event(self._completion([part], usage))
        if self._call.body.include_usage:
            yield event(self._completion([], self._usage()))

    async def whole(self) -> Completion:
        """The same parts, joined."""
        choices = [CompletionChoice(choice.index, "") for choice in self._choices]
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                choices[part.index].extend(part)
        return self._completion(choices, self._usage())

    async def _parts(self) -> AsyncGenerator[CompletionChoice, None]:
        async with aclosing(merge(self._streams)) as steps:
            async for index, step in steps:
                choice = self._choices[index]
                if not choice.started:
                    choice.started = True
                    if index % self._n == 0:
                        self._meter.admit(step.output, len(choice.request.prompt_token_ids))
                    if self._call.body.echo:
                        yield choice.echo()
                yield choice.part(step)

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            self._id, self._created, self._call.model, FINGERPRINT, choices, usage=usage
        )

    def _usage(self) -> Usage:
        return self._meter.usage(sum(choice.reader.num_tokens for choice in self._choices))
