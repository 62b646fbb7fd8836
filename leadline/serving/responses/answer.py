"""The answer to one ``/v1/responses`` request, whole, streamed or in the background."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import takewhile
from typing import Any

from leadline.core.errors import BadRequest
from leadline.serving.body import decode_body
from leadline.serving.chat_call import ChatCall, ChatQuery, prepare_chat
from leadline.serving.chat_run import ChatRun, ChatStep
from leadline.serving.context import Caller, Server
from leadline.serving.errors import describe
from leadline.serving.openai.logprobs import LogprobWriter, TokenLogprob
from leadline.serving.responses.events import OutputWriter
from leadline.serving.responses.query import (
    ENCRYPTED_REASONING,
    input_items,
    responses_query,
    wants_logprobs,
)
from leadline.serving.responses.response import settings, usage
from leadline.serving.responses.schema import ResponsesRequest
from leadline.serving.responses.store import ResponseStore, Stored
from leadline.serving.responses.tools import ToolTable
from leadline.serving.sampling import check_num_logprobs
from leadline.text.chat import Content, Delta
from leadline.text.markers import THINK_END


class ResponsesAnswer:
    """The answer to one request.

    Args:
        server: whose engine answers.
        raw: the body.
        caller: who asks.
        store: where responses are kept, or None.

    Attributes:
        is_stream: which of the two forms the client wants.

    Raises:
        BadRequest: the body cannot be served as it stands.
    """

    def __init__(
        self, server: Server, raw: bytes, caller: Caller, store: ResponseStore | None
    ) -> None:
        body = decode_body(raw, ResponsesRequest)
        self._store = store if body.store is not False else None
        self.is_stream = bool(body.stream)
        self._admission = server.admission
        if body.background and (self._store is None or self.is_stream):
            raise BadRequest(
                "background: only responses that are stored (--enable-responses-store) and not "
                "streamed can be generated in the background",
                param="background",
                code="not_supported",
            )
        check_num_logprobs(body.top_logprobs, server.config.chat.max_logprobs, param="top_logprobs")
        self._owner, self._num_bytes = caller.key, len(raw)
        self._items = [*_history(body, store, caller.key), *input_items(body)]
        tools = ToolTable.of(body.tools or (), has_namespaces=server.encoder.profile.has_namespaces)
        query = responses_query(body, self._items, tools)
        call = _prepare(server, query, caller, truncates=body.truncation == "auto")
        interval = server.config.chat.stream_interval if self.is_stream else 1
        self._run = ChatRun(server, call, caller.request_id, interval=interval)
        self._writer = OutputWriter(
            tools, has_encrypted=ENCRYPTED_REASONING in (body.include or ())
        )
        self._logprobs = LogprobWriter(server.tokenizer) if wants_logprobs(body) else None
        self._marker_ids = server.tokenizer.added_ids
        self._think_end = server.tokenizer.marker_id(THINK_END)
        self._response: dict[str, Any] = {
            "id": f"resp_{call.request.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "queued" if body.background else "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": call.model,
            "output": [],
            "store": self._store is not None,
            "usage": None,
            **settings(body, call.sampling),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, closed by exactly one that holds the whole response (C33)."""
        has_started = False
        try:
            async with aclosing(self._run.steps()) as steps:
                async for step in steps:
                    data = b""
                    if not has_started:
                        has_started = True
                        data = self._lifecycle("created") + self._lifecycle("in_progress")
                    data += self._advance(step)
                    if step.finish_reason is not None:
                        data += self._lifecycle(self._response["status"])
                    if data:
                        yield data
        except Exception as error:
            if not has_started:
                raise
            yield self._fail(error) + self._lifecycle("failed")

    async def whole(self) -> dict[str, Any]:
        """The same items; the events that tell of them are for nobody."""
        if self._response["background"]:
            queued = dict(self._response)
            self._keep().task = asyncio.create_task(self._generate())
            return queued
        await self._read()
        return self._response

    async def _generate(self) -> None:
        """Generate in the background; the client reads the stored response later."""
        with self._admission.extend():
            self._response["status"] = "in_progress"
            try:
                await self._read()
            except Exception as error:
                self._fail(error)

    async def _read(self) -> None:
        async with aclosing(self._run.steps()) as steps:
            async for step in steps:
                self._advance(step)

    def _keep(self) -> Stored:
        assert self._store is not None
        stored = Stored(self._response, self._items, self._owner, self._num_bytes)
        self._store.put(stored)
        return stored

    def _advance(self, step: ChatStep) -> bytes:
        """Take in a step; with the last one the response is complete."""
        data = b"".join([self._writer.add(d, self._entries(step, d)) for d in step.deltas])
        if step.finish_reason is None:
            return data
        is_cut = step.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        data += self._writer.close(status)
        self._response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._writer.output,
            "usage": usage(self._run.counts()),
        }
        if self._store is not None and not self._response["background"]:
            self._keep()
        return data

    def _entries(self, step: ChatStep, delta: Delta) -> Sequence[TokenLogprob]:
        """Log-probabilities of the answer's text: from the end of reasoning to the next marker."""
        if self._logprobs is None or not isinstance(delta, Content):
            return ()
        entries = step.choice.take_entries()
        ends = [i for i, entry in enumerate(entries) if entry.token_id == self._think_end]
        text = entries[ends[-1] + 1 :] if ends else entries
        return self._logprobs.chat(
            list(takewhile(lambda entry: entry.token_id not in self._marker_ids, text))
        )

    def _fail(self, error: Exception) -> bytes:
        """Settle a response that an error ended; returns the events that close its item."""
        failure = describe(error)
        data = self._writer.close("incomplete")
        self._response |= {
            "status": "failed",
            "error": {"code": failure.code or failure.kind, "message": failure.message},
            "output": self._writer.output,
            "usage": usage(self._run.counts()),
        }
        return data

    def _lifecycle(self, name: str) -> bytes:
        return self._writer.event({"type": f"response.{name}", "response": self._response})


def _history(body: ResponsesRequest, store: ResponseStore | None, owner: str) -> list[Any]:
    """Items of the response that a request continues, and of those before it."""
    if body.previous_response_id is None:
        return []
    stored = store.get(body.previous_response_id, owner) if store is not None else None
    if stored is None:
        reason = "it is not kept (any more)"
        if store is None:
            reason = "responses are not stored on this server, send the whole input"
        raise BadRequest(
            f"previous_response_id is {body.previous_response_id[:200]!r}; {reason}",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return [*stored.items, *stored.response["output"]]


def _prepare(server: Server, query: ChatQuery, caller: Caller, *, truncates: bool) -> ChatCall:
    """The call; with ``truncation: auto`` the oldest turns are left out until it fits."""
    try:
        return prepare_chat(server, query, caller)
    except BadRequest as error:
        messages = query.chat.messages
        turns = [i for i, message in enumerate(messages) if i and message["role"] == "user"]
        if error.code != "context_length_exceeded" or not truncates or not turns:
            raise
    head = [message for message in messages[:1] if message["role"] == "system"]

    def without_oldest(first: int) -> ChatQuery:
        return replace(query, chat=replace(query.chat, messages=[*head, *messages[first:]]))

    def fits(first: int) -> bool:
        try:
            prepare_chat(server, without_oldest(first), caller)
        except BadRequest as error:
            if error.code != "context_length_exceeded":
                raise
            return False
        return True

    shortest = bisect_left(turns, True, key=fits)
    return prepare_chat(server, without_oldest(turns[min(shortest, len(turns) - 1)]), caller)
