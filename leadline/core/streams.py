"""Asynchronous streams side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, with the stream's index; closing it closes them all."""
    if len(streams) == 1:  # the usual case goes without tasks and queue
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(2 * len(streams))
    tasks = [asyncio.create_task(_pump(queue, i, stream)) for i, stream in enumerate(streams)]
    num_open = len(streams)
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
    stream: AsyncGenerator[T, None],
) -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put((index, item))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
