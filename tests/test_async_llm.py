"""``AsyncLLM`` over a small model in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from leadline import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from leadline.core.errors import BadRequest, ConfigError, EngineDead

T = TypeVar("T")
SMALL: dict[str, Any] = {
    "kv_cache_memory_bytes": 32 * 2**20,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}
ENDLESS = SamplingParams(max_tokens=2000, ignore_eos=True)


class Process:
    """A started ``AsyncLLM`` and the event loop that it belongs to."""

    def __init__(self, model: Path) -> None:
        self.runner = asyncio.Runner()
        self.llm = self.run(AsyncLLM.start(model, **SMALL))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, timeout=120))

    def close(self) -> None:
        self.run(self.llm.shutdown())
        self.runner.close()

    async def until_idle(self) -> None:
        """Every request has left the engine; ends by ``run``'s limit if one does not."""
        while (stats := await self.llm._engine.stats()).num_running or stats.num_waiting:
            pass
        assert self.llm._open == {}


@pytest.fixture(scope="module")
def process(random_tiny: Path) -> Iterator[Process]:
    process = Process(random_tiny)
    yield process
    process.close()


async def collect(results: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [result async for result in results]


def untimed(outputs: list[CompletionOutput]) -> list[CompletionOutput]:
    """Outputs without log-probabilities, which differ in the last bits from batch to batch."""
    return [replace(output, logprobs=None, cumulative_logprob=None) for output in outputs]


def test_c63_results_grow_to_what_llm_gives(process: Process, random_tiny: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, n=2, logprobs=1, prompt_logprobs=0)
    results = process.run(collect(process.llm.generate("hello", params, "mine")))
    with LLM(random_tiny, **SMALL) as llm:
        [want] = llm.generate("hello", params, use_tqdm=False)
        chat = [{"role": "user", "content": "hello"}]
        [want_chat] = llm.chat(chat, params, use_tqdm=False)
    last = results[-1]
    assert [result.finished for result in results] == [False] * (len(results) - 1) + [True]
    lengths = [len(result.outputs[0].token_ids) for result in results]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 2
    assert untimed(last.outputs) == untimed(want.outputs)
    assert last.outputs[0].logprobs is not None
    assert len(last.outputs[0].logprobs) == len(last.outputs[0].token_ids)
    assert last.prompt_logprobs is not None
    assert len(last.prompt_logprobs) == len(want.prompt_token_ids)
    assert (last.request_id, last.prompt) == ("mine", "hello")
    answered = process.run(collect(process.llm.chat(chat, params)))[-1]
    assert answered.prompt_token_ids == want_chat.prompt_token_ids
    assert untimed(answered.outputs) == untimed(want_chat.outputs)


def test_many_requests_run_together(process: Process) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)

    async def go() -> list[list[RequestOutput]]:
        answers = (collect(process.llm.generate([i + 5], params)) for i in range(9))
        return await asyncio.gather(*answers)

    for i, results in enumerate(process.run(go())):
        assert results[-1].prompt_token_ids == [i + 5]
        assert len(results[-1].outputs[0].token_ids) == 5


@pytest.mark.parametrize("n", [1, 2], ids=["one choice", "two choices"])
def test_leaving_the_loop_aborts(process: Process, n: int) -> None:
    async def go() -> None:
        async for result in process.llm.generate("hello", replace(ENDLESS, n=n)):
            if len(result.outputs[-1].token_ids) > 2:
                break
        await process.until_idle()

    process.run(go())


def test_cancelling_the_task_aborts(process: Process) -> None:
    async def go() -> None:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in process.llm.generate("hello", ENDLESS):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await process.until_idle()

    process.run(go())


def test_abort_ends_a_request_with_its_reason(process: Process) -> None:
    async def go() -> RequestOutput:
        results = []
        async for result in process.llm.generate("hello", replace(ENDLESS, n=2), "long"):
            results.append(result)
            await process.llm.abort("long")
            await process.llm.abort("unknown")
        return results[-1]

    last = process.run(go())
    assert last.finished
    assert [output.finish_reason for output in last.outputs] == ["abort", "abort"]


def test_a_stop_string_ends_the_engines_request_too(process: Process) -> None:
    async def go() -> None:
        params = replace(ENDLESS, temperature=0)
        short = replace(params, max_tokens=9)
        text = (await collect(process.llm.generate("hello", short)))[-1].outputs[0].text
        params = replace(params, stop=(text[3:5],))
        [output] = (await collect(process.llm.generate("hello", params)))[-1].outputs
        assert (output.finish_reason, output.stop_reason) == ("stop", text[3:5])
        assert output.text == text[: text.find(text[3:5])]
        await process.until_idle()

    process.run(go())


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([5] * 100_000, None, "prompt is too long: 100000 tokens"),
        ([2000], None, "prompt holds token id 2000"),
        (5.5, None, "prompt is 5.5; it must be a string"),
        (
            "a",
            SamplingParams(structured_outputs=StructuredOutputsParams(grammar="start: missing")),
            "cannot be compiled",
        ),
    ],
    ids=["too long", "vocabulary", "type", "grammar"],
)
def test_bad_requests_raise_in_the_loop(
    process: Process, prompt: Any, params: SamplingParams | None, message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        process.run(collect(process.llm.generate(prompt, params)))


def test_an_id_in_use_is_refused_and_free_again_afterwards(process: Process) -> None:
    async def go() -> None:
        short = SamplingParams(max_tokens=2)
        async for _ in process.llm.generate("hello", ENDLESS, "same"):
            with pytest.raises(BadRequest, match="request id 'same' is in use"):
                await collect(process.llm.generate("hello", short, "same"))
            await process.llm.abort("same")
        assert (await collect(process.llm.generate("hello", short, "same")))[-1].finished

    process.run(go())


def test_health_tokenizer_and_prefix_cache(process: Process) -> None:
    process.run(process.llm.check_health())
    assert process.llm.get_tokenizer().encode("hello")
    assert process.run(process.llm.reset_prefix_cache())


def test_options_are_checked_before_a_process_is_started(random_tiny: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_modle_len'"):
        asyncio.run(AsyncLLM.start(random_tiny, max_modle_len=5))
    with pytest.raises(ConfigError, match="not a readable tokenizer"):
        asyncio.run(AsyncLLM.start(random_tiny, tokenizer="/nowhere"))


def test_leaving_the_context_ends_the_process_and_open_requests(random_tiny: Path) -> None:
    async def go() -> None:
        async with await AsyncLLM.start(random_tiny, **SMALL) as llm:
            results = llm.generate("hello", ENDLESS)
            assert not (await anext(results)).finished
        with pytest.raises(EngineDead, match="was shut down"):
            await collect(results)
        with pytest.raises(EngineDead):
            await llm.check_health()

    asyncio.run(go())
