from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from leadline.core.streams import merge


class Streams:
    """Endless streams of which some fail, and the indices of those that were closed."""

    def __init__(self) -> None:
        self.closed: list[int] = []

    async def count(self, index: int, *, fails_at: int | None = None) -> AsyncGenerator[int, None]:
        try:
            for i in range(1000):
                await asyncio.sleep(0)
                if i == fails_at:
                    raise ValueError(f"stream {index}")
                yield i
        finally:
            self.closed.append(index)


@pytest.mark.parametrize("num_streams", [1, 3], ids=["alone", "three"])
def test_every_item_comes_once_and_in_its_streams_order(num_streams: int) -> None:
    async def go() -> list[tuple[int, int]]:
        streams = Streams()
        return [item async for item in merge([streams.count(i) for i in range(num_streams)])]

    items = asyncio.run(go())
    assert len(items) == 1000 * num_streams
    for index in range(num_streams):
        assert [item for i, item in items if i == index] == list(range(1000))


@pytest.mark.parametrize("num_streams", [1, 3], ids=["alone", "three"])
def test_closing_it_closes_all_streams(num_streams: int) -> None:
    async def go() -> list[int]:
        streams = Streams()
        async with aclosing(merge([streams.count(i) for i in range(num_streams)])) as items:
            async for index, _ in items:
                if index == num_streams - 1:
                    break
        return streams.closed

    assert sorted(asyncio.run(go())) == list(range(num_streams))


def test_an_error_of_one_stream_closes_the_others() -> None:
    async def go() -> list[int]:
        streams = Streams()
        with pytest.raises(ValueError, match="stream 1"):
            async for _ in merge([streams.count(0), streams.count(1, fails_at=5)]):
                pass
        return streams.closed

    assert sorted(asyncio.run(go())) == [0, 1]
