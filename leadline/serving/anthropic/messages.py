"""``POST /v1/messages`` and ``/v1/messages/count_tokens`` (serving-api 8)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from leadline.core.errors import BadRequest
from leadline.serving.anthropic.events import BlockWriter, named
from leadline.serving.anthropic.query import messages_query
from leadline.serving.anthropic.schema import MessagesRequest
from leadline.serving.body import decode_body
from leadline.serving.chat_call import encode_query, prepare_chat
from leadline.serving.chat_run import ChatRun, ChatStep, ChoiceRun
from leadline.serving.context import Caller, Server
from leadline.serving.endpoint import reply, respond

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def messages(http: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    return await respond(http, MessagesAnswer)


async def count_tokens(http: Request) -> Response:
    """The length of the prompt that ``messages`` would use (C37)."""
    return await reply(http, _count_tokens)


def _count_tokens(server: Server, raw: bytes, caller: Caller) -> dict[str, int]:
    query = messages_query(decode_body(raw, MessagesRequest))
    _, prompt = encode_query(server, query, caller)
    return {"input_tokens": len(prompt.token_ids)}


class MessagesAnswer:
    """The answer to one conversation.

    Raises:
        BadRequest: the body cannot be served as it stands.
    """

    def __init__(self, server: Server, raw: bytes, caller: Caller) -> None:
        body = decode_body(raw, MessagesRequest)
        if body.max_tokens is None:
            raise BadRequest("max_tokens: this field is required", param="max_tokens")
        self.is_stream = bool(body.stream)
        call = prepare_chat(server, messages_query(body), caller)
        self._id = f"msg_{call.request.request_id}"
        self._model = call.model
        self._writer = BlockWriter(signature=self._id)
        self._run = ChatRun(
            server,
            call,
            caller.request_id,
            interval=server.config.chat.stream_interval if self.is_stream else 1,
            shows_reasoning=call.prompt.thinking,  # C35
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; one item holds what one output of the engine gave."""
        has_started = False
        async with aclosing(self._run.steps()) as steps:
            async for step in steps:
                data = b""
                if not has_started:
                    has_started = True
                    data = named({"type": "message_start", "message": self._message(None)})
                    data += named({"type": "ping"})
                data += self._advance(step)
                if step.finish_reason is not None:
                    ending = _ending(step.choice)
                    usage = self._usage()
                    data += named({"type": "message_delta", "delta": ending, "usage": usage})
                    data += named({"type": "message_stop"})
                if data:
                    yield data

    async def whole(self) -> dict[str, Any]:
        """The same blocks; the events that tell of them are for nobody."""
        async with aclosing(self._run.steps()) as steps:
            async for step in steps:
                self._advance(step)
        return self._message(self._run.choices[0])

    def _advance(self, step: ChatStep) -> bytes:
        data = b"".join(map(self._writer.add, step.deltas))
        return data if step.finish_reason is None else data + self._writer.close()

    def _message(self, choice: ChoiceRun | None) -> dict[str, Any]:
        """The message so far; ``choice`` is one that has ended."""
        ending = {"stop_reason": None, "stop_sequence": None}
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._writer.content,
            **(ending if choice is None else _ending(choice)),
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """The three counts of input tokens sum to the prompt's length (C36)."""
        counts = self._run.counts()
        return {
            "input_tokens": counts.prompt - counts.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached,
            "output_tokens": counts.completion,
        }


def _ending(choice: ChoiceRun) -> dict[str, str | None]:
    matched = choice.parser.stop_reason
    if isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    reason = _STOP_REASONS[choice.parser.finish_reason or "stop"]
    return {"stop_reason": reason, "stop_sequence": None}
