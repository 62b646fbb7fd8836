from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from leadline.config.engine import EngineConfig
from leadline.core.client import EngineClient, EngineStats
from leadline.core.errors import (
    BadRequest,
    CheckpointError,
    EngineDead,
    EngineOverloaded,
    LeadlineError,
)
from leadline.core.request import (
    Constraint,
    EngineRequest,
    FinishReason,
    TokenLogprobs,
    TokenOutput,
)
from leadline.engine import async_engine
from leadline.engine.async_engine import AsyncEngine, _Stream
from tests.fakes import FIRST_ID, VOCAB_SIZE, expected_tokens, next_token, request
from tests.grammars import text_of, write_tokenizer

T = TypeVar("T")
CONFIG = EngineConfig(model="fake")
FACTORY = "tests.fakes:build_fake_engine"
GOOD = 'start: "abc"'


# A server that is killed while its engine works.
PARENT = f"""
import asyncio
from leadline.config.engine import EngineConfig
from leadline.engine.async_engine import AsyncEngine
from tests.fakes import request

async def main():
    engine = await AsyncEngine.start(EngineConfig(model="fake"), factory={FACTORY!r})
    async for output in engine.submit(request("a", [20], 2000)):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Process:
    """An engine process and the event loop that it belongs to, shared by the tests below."""

    def __init__(self, config: EngineConfig) -> None:
        self.runner = asyncio.Runner()
        self.engine = self.run(AsyncEngine.start(config, factory=FACTORY))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, timeout=180))

    def close(self) -> None:
        self.run(self.engine.shutdown())
        self.runner.close()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Of an engine with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return EngineConfig(model=str(folder))


@pytest.fixture(scope="module")
def process(config: EngineConfig) -> Iterator[Process]:
    process = Process(config)
    yield process
    process.close()


async def collect(stream: AsyncIterator[TokenOutput]) -> list[TokenOutput]:
    return [output async for output in stream]


def constrained(grammar: str) -> EngineRequest:
    return dataclasses.replace(request("a", [20], 50), constraint=Constraint(grammar))


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def assert_idle(stats: EngineStats) -> None:
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert (stats.num_free_pages, stats.num_free_slots) == (stats.num_pages, stats.num_slots)


def test_concurrent_streams_each_get_their_own_tokens(process: Process) -> None:
    engine: EngineClient = process.engine
    prompts = [
        random.Random(i).choices(range(FIRST_ID, VOCAB_SIZE), k=40 * i + 1) for i in range(8)
    ]

    async def go() -> None:
        streams = [engine.submit(request(f"r{i}", ids, 20)) for i, ids in enumerate(prompts)]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        for ids, outputs in zip(prompts, results, strict=True):
            assert tokens_of(outputs) == expected_tokens(ids, 20)
            assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert_idle(await engine.stats())

    process.run(go())


def test_closing_the_iterator_aborts_the_request(process: Process) -> None:
    async def go() -> None:
        stream = process.engine.submit(request("closed", [20], 2000))
        assert (await anext(stream)).token_ids
        assert (await process.engine.stats()).num_running == 1
        await stream.aclose()
        stats = await process.engine.stats()
        assert_idle(stats)
        assert stats.finished["abort"] == 1

    process.run(go())


def test_cancelling_the_reader_aborts_the_request(process: Process) -> None:
    async def go() -> None:
        before = (await process.engine.stats()).finished["abort"]
        reader = asyncio.create_task(collect(process.engine.submit(request("gone", [20], 2000))))
        while not (await process.engine.stats()).num_running:
            pass
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        stats = await process.engine.stats()
        assert_idle(stats)
        assert stats.finished["abort"] == before + 1

    process.run(go())


def test_abort_by_id_ends_the_stream_with_its_reason(process: Process) -> None:
    async def go() -> None:
        stream = process.engine.submit(request("told", [20], 2000))
        got = [await anext(stream)]
        await process.engine.abort("told")
        got += await collect(stream)
        assert got[-1].finish_reason is FinishReason.ABORT
        tokens = tokens_of(got)
        assert tokens == expected_tokens([20], len(tokens))
        await process.engine.abort("told")
        await process.engine.abort("never seen")
        assert_idle(await process.engine.stats())

    process.run(go())


def test_a_bad_request_is_refused_by_submit_itself(process: Process) -> None:
    async def go() -> None:
        with pytest.raises(BadRequest, match="maximum context length is 2048 tokens") as caught:
            process.engine.submit(request("long", [20] * 3000, 5))
        assert caught.value.code == "context_length_exceeded"
        stream = process.engine.submit(request("twin", [20], 2000))
        await anext(stream)
        with pytest.raises(BadRequest, match="request id 'twin' is in use"):
            await anext(process.engine.submit(request("twin", [20], 5)))
        await stream.aclose()

    process.run(go())


def test_a_request_that_cannot_be_pickled_harms_nobody_else(process: Process) -> None:
    odd: Any = request("odd", [20], 5)
    with pytest.raises(Exception, match="pickle"):
        process.run(collect(process.engine.submit(dataclasses.replace(odd, session_key=lambda: 0))))
    odd = request("odd", [20], 5, logit_bias=MappingProxyType({}))
    assert tokens_of(process.run(collect(process.engine.submit(odd)))) == expected_tokens([20], 5)


def test_a_failed_step_reaches_its_stream_as_an_error_output(process: Process) -> None:
    async def go() -> None:
        for ids, message in (([20, 13], "id 13 cannot be run"), ([20, 14], "request bad:")):
            [output] = await collect(process.engine.submit(request("bad", ids, 5)))
            assert output.finish_reason is FinishReason.ERROR
            assert output.error is not None
            assert message in output.error
        await process.engine.health()

    process.run(go())


def test_prompt_logits_arrive_as_an_array_and_their_errors_as_errors(process: Process) -> None:
    async def go() -> None:
        ids = [20, 30, 40]
        logits = await process.engine.prompt_logits(ids)
        assert logits.shape == (3, VOCAB_SIZE)
        assert logits.dtype == np.float32
        assert logits.argmax(-1).tolist() == [next_token(ids[: i + 1]) for i in range(3)]
        with pytest.raises(LeadlineError, match="id 13 cannot be run"):
            await process.engine.prompt_logits([13])
        with pytest.raises(BadRequest, match="the prompt is empty"):
            await process.engine.prompt_logits([])

    process.run(go())


def test_a_paused_engine_answers_and_goes_on_when_resumed(process: Process) -> None:
    async def go() -> None:
        await process.engine.pause(True)
        reader = asyncio.create_task(collect(process.engine.submit(request("paused", [20], 3))))
        while not (await process.engine.stats()).num_waiting:
            pass
        await process.engine.health()
        assert not reader.done()
        await process.engine.pause(False)
        assert tokens_of(await reader) == expected_tokens([20], 3)
        assert await process.engine.reset_prefix_cache()

    process.run(go())


def test_more_than_the_queue_holds_is_refused_and_the_others_are_served(process: Process) -> None:
    async def go() -> None:
        await process.engine.pause(True)
        # 8 slots and a queue of 8; all 17 are submitted before any is read.
        streams = [process.engine.submit(request(f"q{i}", [20 + i], 1)) for i in range(17)]
        readers = [asyncio.create_task(collect(stream)) for stream in streams]
        with pytest.raises(EngineOverloaded, match="16 requests are running or waiting"):
            await readers[16]
        with pytest.raises(EngineOverloaded):
            process.engine.submit(request("r", [20], 1))
        await process.engine.pause(False)
        for i, reader in enumerate(readers[:16]):
            assert tokens_of(await reader) == [next_token([20 + i])]

    process.run(go())


def test_ctrl_c_in_the_terminal_does_not_end_the_engine_process(process: Process) -> None:
    async def go() -> None:
        os.kill(process.engine.pid, signal.SIGINT)
        await process.engine.health()
        assert tokens_of(await collect(process.engine.submit(request("a", [20], 2))))

    process.run(go())


def test_a_killed_process_fails_whatever_is_open_and_whatever_comes(config: EngineConfig) -> None:
    async def go() -> None:
        engine = await AsyncEngine.start(config, factory=FACTORY)
        await collect(engine.submit(constrained(GOOD)))
        probes = psutil.Process(engine.pid).children()
        assert probes
        streams = [engine.submit(request(f"r{i}", [20 + i], 2000)) for i in range(3)]
        for stream in streams:
            await anext(stream)
        readers = [asyncio.create_task(collect(stream)) for stream in streams]
        late = engine.submit(request("late", [20], 5))  # not read before the end
        os.kill(engine.pid, signal.SIGKILL)
        for reader in readers:
            with pytest.raises(EngineDead, match=r"the engine process ended \(exit code -9\)"):
                await reader
        for call in (engine.health(), engine.stats(), engine.prompt_logits([20]), anext(late)):
            with pytest.raises(EngineDead, match="exit code -9"):
                await call
        with pytest.raises(EngineDead):
            engine.submit(request("next", [20], 5))
        # However the engine ends, what it started ends too.
        assert psutil.wait_procs(probes, timeout=60)[1] == []
        await engine.shutdown()

    asyncio.run(asyncio.wait_for(go(), timeout=180))


def test_item_92_a_killed_process_is_replaced_and_serves_again() -> None:
    async def go() -> None:
        engine = await AsyncEngine.start(CONFIG, factory=FACTORY)
        stream = engine.submit(request("open", [20], 2000))
        await anext(stream)
        assert not engine.died.is_set()
        old = engine.pid
        os.kill(old, signal.SIGKILL)
        await engine.died.wait()
        with pytest.raises(EngineDead, match="exit code -9"):
            await collect(stream)
        await engine.restart()
        assert not engine.died.is_set()
        assert engine.pid != old
        await engine.health()
        assert tokens_of(await collect(engine.submit(request("open", [20], 3)))) == (
            expected_tokens([20], 3)
        )
        await engine.shutdown()
        assert not engine.died.is_set()  # it was told to
        for pid in (old, engine.pid):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(asyncio.wait_for(go(), timeout=180))


def test_a_hung_step_delays_no_scrape_and_shows_as_stalled(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "STATS_SECONDS", 0.05)
    engine = process.engine

    async def go() -> None:
        stream = engine.submit(request("a", [20], 2000))
        await anext(stream)
        os.kill(engine.pid, signal.SIGSTOP)
        stats = await engine.stats()
        while stats.stalled_seconds <= 0.1:
            stats = await engine.stats()
        assert stats.max_model_len == 2048
        os.kill(engine.pid, signal.SIGCONT)
        while (await engine.stats()).stalled_seconds:
            await anext(stream)
        await stream.aclose()

    process.run(go())


def test_c43_grammars_are_compiled_while_others_decode_and_bad_ones_are_refused(
    process: Process,
) -> None:
    engine = process.engine

    async def go() -> None:
        # Nothing else runs: the engine is woken by the compiled grammar alone.
        assert text_of(tokens_of(await collect(engine.submit(constrained(GOOD))))) == "abc"
        other = engine.submit(request("other", [20], 2000))
        await anext(other)
        with pytest.raises(BadRequest, match="Expected token") as caught:
            await collect(engine.submit(constrained("start: (")))
        assert (caught.value.code, caught.value.param) == ("invalid_schema", "structured_outputs")
        await anext(other)
        await other.aclose()
        assert_idle(await engine.stats())

    process.run(go())


def test_c49_a_request_may_leave_while_its_grammar_is_compiled(process: Process) -> None:
    engine = process.engine
    slow = constrained("start: " + "|".join(f'"abc{i}"' for i in range(20_000)))

    async def go() -> None:
        late = dataclasses.replace(slow, request_id="late", timeout_seconds=0.05)
        reader = asyncio.create_task(collect(engine.submit(slow)))
        [output] = await collect(engine.submit(late))
        assert output.finish_reason is FinishReason.TIMEOUT
        assert (await engine.stats()).num_deferred == 1
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert_idle(await engine.stats())

    process.run(go())


def test_shutdown_ends_open_requests_and_the_process() -> None:
    async def go() -> None:
        engine = await AsyncEngine.start(CONFIG, factory=FACTORY)
        stream = engine.submit(request("a", [20], 2000))
        await anext(stream)
        await engine.shutdown()
        with pytest.raises(EngineDead, match="the engine was shut down"):
            await collect(stream)
        with pytest.raises(ProcessLookupError):
            os.kill(engine.pid, 0)
        await engine.shutdown()

    asyncio.run(asyncio.wait_for(go(), timeout=180))


def test_an_engine_process_does_not_outlive_its_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
        # The engine process holds the other copy of this pipe's end: it closes with the last one.
        assert parent.stdout.read() == b""


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        ("missing_shard", CheckpointError, "fake: shard 3 is missing"),
        ("bad_request", BadRequest, "no such thing"),
        ("foreign", EngineDead, "the engine could not start: Unpicklable: somebody else's"),
        ("not_there", EngineDead, "the engine could not start: AttributeError: .*not_there"),
        ("sudden_end", EngineDead, r"ended while it started \(exit code 3\)"),
    ],
    ids=["ours", "ours with fields", "foreign", "no factory", "sudden end"],
)
def test_an_error_at_start_is_raised_where_start_was_called(
    factory: str, error: type[LeadlineError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        asyncio.run(AsyncEngine.start(CONFIG, factory=f"tests.failing_factories:{factory}"))
    if isinstance(caught.value, BadRequest):
        assert (caught.value.param, caught.value.code) == ("here", "odd")


def test_outputs_that_come_after_an_error_do_not_hide_it() -> None:
    """Some are on their way when an engine is shut down."""

    async def go() -> None:
        stream = _Stream()
        stream.put(EngineDead("the engine was shut down"))
        stream.put(TokenOutput("a", (5,)))
        with pytest.raises(EngineDead, match="the engine was shut down"):
            await stream.get()

    asyncio.run(asyncio.wait_for(go(), timeout=60))


def test_a_slow_reader_finds_one_output_with_everything_in_it() -> None:
    async def go() -> None:
        stream = _Stream()
        for token in range(100):
            stream.put(TokenOutput("a", (token,), (TokenLogprobs(token, -1.0, 1),)))
        stream.put(TokenOutput("a", finish_reason=FinishReason.STOP, stop_token_id=99))
        stream.put(EngineDead("after the last word"))
        output = await stream.get()
        assert output.token_ids == tuple(range(100))
        assert [entry.token_id for entry in output.logprobs] == list(range(100))
        assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, 99)

    asyncio.run(go())
