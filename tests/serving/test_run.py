"""The life of a server: not ready, ready, draining, gone (C57)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from leadline.config.args import from_values
from leadline.config.server import ServerConfig
from leadline.core.errors import CheckpointError, EngineDead
from leadline.serving import run as run_module
from leadline.serving.run import ServerProcess
from tests.serving.conftest import HELLO, MakeRig, Rig
from tests.serving.scripted import ScriptedEngine

CHAT = "/v1/chat/completions"
BODY = {"messages": HELLO, "thinking": {"type": "disabled"}}
Test = Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]


class Life:
    """A server process within this one, over a scripted engine."""

    def __init__(self, rig: Rig, **config: Any) -> None:
        self.rig = rig
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.is_closed = False
        self.load_error: Exception | None = None
        self._config = from_values(ServerConfig, {"drain_delay": 0.0, **config})

    @asynccontextmanager
    async def load(self) -> AsyncIterator[tuple[Starlette, ScriptedEngine]]:
        await self.may_load.wait()
        if self.load_error:
            raise self.load_error
        try:
            yield self.rig.app, self.rig.engine
        finally:
            self.is_closed = True

    async def _run(self, test: Test) -> None:
        self.rig.engine.gate = asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            life = asyncio.create_task(ServerProcess(self._config, self.load).run(listener))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                tested = asyncio.create_task(test(http))
                await asyncio.wait_for(asyncio.gather(life, tested), 30)

    def run(self, test: Test) -> None:
        """Serve while ``test`` runs, which ends the server in one way or another."""
        asyncio.run(self._run(test))


async def until(http: httpx.AsyncClient, status: int) -> None:
    """Wait until ``/health`` says so."""
    while (await http.get("/health")).status_code != status:
        await asyncio.sleep(0.005)


def tell(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


async def opened(http: httpx.AsyncClient, engine: ScriptedEngine, **body: Any) -> Any:
    """A request that runs, its end still to come."""
    task = asyncio.create_task(http.post(CHAT, json=BODY | body))
    while not engine.requests:
        await asyncio.sleep(0.001)
    return task


def test_the_port_is_open_and_not_ready_before_the_model_is_loaded(rig: MakeRig) -> None:
    life = Life(rig("ab"))
    life.may_load.clear()

    async def test(http: httpx.AsyncClient) -> None:
        for path in ("/health", "/ping"):
            reply = await http.get(path)
            assert (reply.status_code, reply.content) == (503, b"")
        reply = await http.post(CHAT, json=BODY)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "not_ready"
        assert reply.headers["retry-after"] == "5"
        assert reply.headers["x-request-id"]
        assert (await http.get("/version")).status_code == 200
        life.may_load.set()
        await until(http, 200)
        tell()

    life.run(test)
    assert life.is_closed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_c57_running_requests_end_and_new_ones_are_refused(
    rig: MakeRig, number: signal.Signals, stream: bool
) -> None:
    life = Life(rig("ab"))
    engine = life.rig.engine

    async def test(http: httpx.AsyncClient) -> None:
        await until(http, 200)
        running = await opened(http, engine, stream=stream)
        tell(number)
        await until(http, 503)
        reply = await http.post(CHAT, json=BODY)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "shutting_down"
        assert reply.headers["retry-after"]
        assert (await http.get("/v1/models")).status_code == 200
        assert engine.gate is not None
        engine.gate.set()
        answer = await running
        assert answer.status_code == 200
        assert "error" not in answer.text

    life.run(test)
    assert life.is_closed


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_c57_requests_that_take_too_long_end_with_an_error(rig: MakeRig, stream: bool) -> None:
    life = Life(rig("ab"), shutdown_timeout=0)

    async def test(http: httpx.AsyncClient) -> None:
        await until(http, 200)
        running = await opened(http, life.rig.engine, stream=stream)
        tell()
        answer = await running
        assert "the engine was shut down" in answer.text
        assert answer.text.endswith("data: [DONE]\n\n") == stream

    life.run(test)


def test_the_port_stays_open_for_load_balancers_until_a_second_signal(rig: MakeRig) -> None:
    life = Life(rig("ab"), drain_delay=1000.0)

    async def test(http: httpx.AsyncClient) -> None:
        await until(http, 200)
        tell()
        await until(http, 503)
        async with httpx.AsyncClient(base_url=http.base_url) as fresh:
            assert (await fresh.get("/health")).status_code == 503
        tell()

    with pytest.raises(KeyboardInterrupt):
        life.run(test)
    assert life.is_closed


def test_a_signal_while_the_model_is_loaded_ends_everything_now(rig: MakeRig) -> None:
    life = Life(rig("ab"))
    life.may_load.clear()

    async def test(http: httpx.AsyncClient) -> None:
        await until(http, 503)
        tell()

    life.run(test)


def test_an_error_while_loading_ends_the_server(rig: MakeRig) -> None:
    life = Life(rig("ab"))
    life.load_error = CheckpointError("no such file")

    async def test(_http: httpx.AsyncClient) -> None:
        return

    with pytest.raises(CheckpointError, match="no such file"):
        life.run(test)


async def kill(engine: ScriptedEngine) -> None:
    """The engine's process ends by itself; its requests fail."""
    await engine.shutdown()
    engine.died.set()


def test_item_92_the_server_ends_with_its_engine(rig: MakeRig) -> None:
    life = Life(rig("ab"))
    engine = life.rig.engine
    told: list[str] = []

    async def test(http: httpx.AsyncClient) -> None:
        await until(http, 200)
        running = await opened(http, engine, stream=True)
        await kill(engine)
        told.append((await running).text)

    with pytest.raises(EngineDead, match="ended by itself"):
        life.run(test)
    assert told[0].count('data: {"error"') == 1
    assert told[0].endswith("data: [DONE]\n\n")
    assert life.is_closed


def test_item_92_or_the_engine_is_started_again(rig: MakeRig) -> None:
    life = Life(rig("ab"), auto_restart=True)
    engine = life.rig.engine

    async def test(http: httpx.AsyncClient) -> None:
        await until(http, 200)
        running = await opened(http, engine)
        await kill(engine)
        assert (await running).status_code == 500
        await until(http, 200)
        assert (await http.post(CHAT, json=BODY)).status_code == 200
        tell()

    life.run(test)


def test_an_engine_that_dies_again_and_again_is_not_started_in_a_loop(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_module, "_RESTART_DELAYS", (0.0, 1000.0))
    life = Life(rig("ab"), auto_restart=True)

    async def test(http: httpx.AsyncClient) -> None:
        for _ in range(2):
            await until(http, 200)
            await kill(life.rig.engine)
        while "starts again in 1000 s" not in caplog.text:
            await asyncio.sleep(0.001)
        assert (await http.get("/health")).status_code == 503
        tell()

    life.run(test)
    assert life.is_closed
