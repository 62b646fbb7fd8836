"""From a prompt to the outputs of its choices, whatever the dialect of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from leadline.core.errors import BadRequest, EngineDead, EngineOverloaded, RequestTimeout
from leadline.core.request import EngineRequest, FinishReason, TokenOutput
from leadline.serving.admission import charge
from leadline.serving.context import Server
from leadline.serving.errors import GenerationFailed

T = TypeVar("T")
Piece = TypeVar("Piece", covariant=True)


class Step(NamedTuple, Generic[Piece]):
    """One output of the engine as its reader saw it.

    Attributes:
        piece: what the reader made of it.
        num_tokens: how many of its tokens count: those up to a stop string's end.
        finish_reason: set with the last step of a choice.
    """

    output: TokenOutput
    piece: Piece
    num_tokens: int
    finish_reason: str | None


class OutputReader(Protocol[Piece]):
    """Turns engine outputs of one choice into pieces: ``TextOutput`` or ``OutputParser``."""

    num_tokens: int

    @property
    def finish_reason(self) -> str | None: ...

    def push(self, output: TokenOutput) -> Piece: ...


def choice_requests(request: EngineRequest, *, first: int = 0) -> list[EngineRequest]:
    """``request`` for each of its ``n`` choices, with seeds ``seed + i`` (serving-api 9.1).

    Args:
        request: what the choices share; their ids are its own with a number.
        first: the number of the first one.
    """
    return [
        replace(
            request,
            request_id=f"{request.request_id}-{first + i}",
            sampling=request.sampling.choice(i),
        )
        for i in range(request.sampling.n)
    ]


async def read_choice(
    server: Server, request: EngineRequest, reader: OutputReader[Piece], log_id: str
) -> AsyncGenerator[Step[Piece], None]:
    """Submit ``request`` and read its outputs, step by step.

    Ends with the reader, which may be before the engine; closing it aborts the request.

    Raises:
        GenerationFailed: the engine ended the request with an error.
        LeadlineError: whatever ``EngineClient.submit`` raises.
    """
    record = server.record(request, log_id)
    reason: str | None = "abort"
    try:
        async with aclosing(server.client.submit(request)) as outputs:
            async for output in outputs:
                record.observe(output)
                if output.finish_reason is FinishReason.TIMEOUT:
                    raise RequestTimeout(output.error or "the request took too long")
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise GenerationFailed(output.error or "the server ended this request")
                num_before = reader.num_tokens
                piece = reader.push(output)
                finished = reader.finish_reason
                if finished is not None:
                    reason = "length" if finished == FinishReason.LENGTH else "stop"
                yield Step(output, piece, reader.num_tokens - num_before, finished)
                if finished is not None:
                    return
            raise EngineDead("the engine ended in the middle of this request")
    except (BadRequest, EngineOverloaded):
        reason = None  # never accepted
        raise
    except Exception:
        reason = "error"
        raise
    finally:
        if reason is not None:
            charge(len(request.prompt_token_ids) + reader.num_tokens)
            record.finish(reason, reader.num_tokens)


async def merge(
    choices: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all choices as they come, with the choice's index; closing it closes them all."""
    if len(choices) == 1:  # the usual case goes without tasks and queue
        async with aclosing(choices[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(2 * len(choices))
    tasks = [asyncio.create_task(_pump(queue, i, choice)) for i, choice in enumerate(choices)]
    num_open = len(choices)
    try:
        while num_open:
            message = await queue.get()
            if isinstance(message, Exception):
                raise message
            if message is None:
                num_open -= 1
            else:
                yield message
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    queue: asyncio.Queue[tuple[int, T] | Exception | None],
    index: int,
    choice: AsyncGenerator[T, None],
) -> None:
    try:
        async with aclosing(choice) as items:
            async for item in items:
                await queue.put((index, item))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
