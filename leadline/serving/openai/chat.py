"""``POST /v1/chat/completions`` (serving-api 5)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from leadline.serving.body import decode_body
from leadline.serving.chat_call import prepare_chat
from leadline.serving.chat_run import ChatRun, ChoiceRun
from leadline.serving.context import Caller, Server
from leadline.serving.endpoint import respond
from leadline.serving.openai.answers import (
    FINGERPRINT,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Function,
    ToolCall,
    Usage,
)
from leadline.serving.openai.chat_query import chat_query
from leadline.serving.openai.chunks import ChunkWriter, ReasoningKeys
from leadline.serving.openai.logprobs import ChatLogprobs, LogprobWriter, PromptLogprobs
from leadline.serving.openai.schema import ChatRequest
from leadline.serving.sampling import check_num_logprobs
from leadline.text.chat import CallArguments, CallStart, Content, Delta, Reasoning


async def chat_completions(http: Request) -> Response:
    """Answer a chat, whole or as a stream."""
    return await respond(http, ChatAnswer)


class ChatAnswer:
    """The answer to one chat.

    Raises:
        BadRequest: the body cannot be served as it stands.
    """

    def __init__(self, server: Server, raw: bytes, caller: Caller) -> None:
        body = decode_body(raw, ChatRequest)
        self._body = body
        self._config = server.config.chat
        check_num_logprobs(body.top_logprobs, self._config.max_logprobs, param="top_logprobs")
        self._call = prepare_chat(server, chat_query(body), caller)
        self.is_stream = bool(body.stream)
        interval = body.stream_interval or self._config.stream_interval
        self._run = ChatRun(
            server,
            self._call,
            caller.request_id,
            interval=interval if self.is_stream else 1,
            shows_reasoning=body.include_reasoning is not False,
            keeps_ids=bool(body.return_token_ids),
        )
        self._id = f"chatcmpl-{body.request_id or self._call.request.request_id}"
        self._created = int(time.time())
        self._reasoning = ReasoningKeys(self._config.reasoning_field)
        self._logprobs = LogprobWriter(
            server.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; one item holds what one output of the engine gave."""
        counts_on = self._body.continuous_usage
        has_usage = self._body.include_usage or self._config.enable_force_include_usage
        writer = ChunkWriter(
            self._run,
            (self._id, self._created, self._call.model),
            self._reasoning,
            logprobs=self._logprobs if self._body.logprobs else None,
            has_usage=has_usage,
            counts_on=counts_on,
            usage_at_finish=counts_on or self._config.usage_in_final_chunk,
        )
        started: set[int] = set()
        async with aclosing(self._run.steps()) as steps:
            async for choice, _, deltas, finish_reason in steps:
                data = b""
                if choice.index not in started:
                    started.add(choice.index)
                    data = writer.start(choice)
                for delta in deltas:
                    data += writer.delta(choice, delta)
                if finish_reason is not None:
                    data += writer.finish(choice)
                if data:
                    yield data
        if has_usage:
            yield writer.usage()

    async def whole(self) -> ChatCompletion:
        """The same deltas, joined."""
        messages = [_Message() for _ in self._run.choices]
        prompt_logprobs: PromptLogprobs | UnsetType = UNSET
        async with aclosing(self._run.steps()) as steps:
            async for choice, output, deltas, _ in steps:
                messages[choice.index].add(deltas)
                if output.prompt_logprobs and prompt_logprobs is UNSET:
                    prompt_logprobs = self._logprobs.prompt(output.prompt_logprobs)
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._call.model,
            system_fingerprint=FINGERPRINT,
            choices=[
                self._choice(choice, message)
                for choice, message in zip(self._run.choices, messages, strict=True)
            ],
            usage=Usage.of(self._run.counts()),
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=(
                self._call.prompt.token_ids if self._body.return_token_ids else UNSET
            ),
        )

    def _choice(self, choice: ChoiceRun, message: _Message) -> ChatChoice:
        entries = choice.take_entries()
        return ChatChoice(
            index=choice.index,
            message=message.joined(self._reasoning),
            logprobs=ChatLogprobs(self._logprobs.chat(entries)) if self._body.logprobs else None,
            finish_reason=choice.parser.finish_reason or "",
            stop_reason=choice.parser.stop_reason,
            token_ids=choice.take_token_ids() if self._body.return_token_ids else UNSET,
        )


class _Message:
    """Collects the deltas of one choice."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            match delta:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallStart():
                    self._calls.append((delta, []))
                case CallArguments(_, text):
                    self._calls[-1][1].append(text)

    def joined(self, keys: ReasoningKeys) -> ChatMessage:
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = [
            ToolCall(call.id, Function(call.name, "".join(fragments)))
            for call, fragments in self._calls
        ]
        deepseek, openrouter = keys.spread(reasoning)
        return ChatMessage(
            content=None if not content and (calls or reasoning) else content,
            reasoning_content=deepseek or UNSET,
            reasoning=openrouter or UNSET,
            tool_calls=calls or UNSET,
        )
