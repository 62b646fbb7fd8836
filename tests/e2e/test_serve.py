"""``leadline serve`` as a stranger runs it: a process, a port, openai-python."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from tests.e2e.process import Served, until

WORDS = ["harbour", "lead", "line", "fathom", "tide", "chart", "keel", "anchor", "swell", "beacon"]


async def stream_chat(client: AsyncOpenAI, words: int, seed: int) -> list[ChatCompletionChunk]:
    """A prompt of about ``words`` words, 32 tokens of answer."""
    text = " ".join(random.Random(seed).choices(WORDS, k=words))
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": text}],
        max_tokens=32,
        seed=seed,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    return [chunk async for chunk in stream]


def check_stream(chunks: list[ChatCompletionChunk]) -> None:
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    *body, last, usage = chunks
    assert body[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].finish_reason is None for chunk in body)
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 32
    details = usage.usage.completion_tokens_details
    assert details is not None
    assert 0 <= (details.reasoning_tokens or 0) <= 32


def chats_at_once(server: Served, lengths: list[int]) -> None:
    async def run() -> list[list[ChatCompletionChunk]]:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600
        ) as client:
            chats = (stream_chat(client, words, seed) for seed, words in enumerate(lengths))
            return await asyncio.gather(*chats)

    answers = asyncio.run(run())
    assert len(answers) == len(lengths)
    for chunks in answers:
        check_stream(chunks)
    assert not any(server.work_left().values())


def test_64_concurrent_streamed_chats_with_short_prompts(server: Served) -> None:
    draw = random.Random(1)
    chats_at_once(server, [draw.randrange(3, 40) for _ in range(64)])


@pytest.mark.slow
def test_64_concurrent_streamed_chats_with_prompts_of_10_to_2000_tokens(server: Served) -> None:
    draw = random.Random(2)
    chats_at_once(server, [draw.randrange(4, 700) for _ in range(64)])


def test_a_bad_request_among_good_ones_harms_nobody(server: Served) -> None:
    reply = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": []})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages"
    chats_at_once(server, [5, 9])


def test_a_client_that_leaves_gives_everything_back(server: Served) -> None:
    async def leave() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.completions.create(
                model="tiny",
                prompt="x",
                max_tokens=4000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(leave())
    asyncio.run(until(lambda: not any(server.work_left().values()), "a request was left open"))
