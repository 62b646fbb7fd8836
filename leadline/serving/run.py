"""The life of a server process: port first, then the model, then requests, then a quiet end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from leadline.config.server import ServerConfig
from leadline.core.client import EngineClient
from leadline.core.errors import ConfigError, EngineDead
from leadline.serving.context import Server
from leadline.serving.http import HttpConfig, HttpServer, refresh_certificates
from leadline.serving.starting import starting_app

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.5


class EngineProcess(EngineClient, Protocol):
    """An engine that whoever runs the server may also end."""

    async def shutdown(self) -> None:
        """End it; open requests fail with ``EngineDead``. May be called twice."""
        ...


class Door:
    """The application that clients reach: a small one until the model is loaded."""

    def __init__(self) -> None:
        self._app: ASGIApp = starting_app()

    def open(self, app: ASGIApp) -> None:
        """Let requests through to ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class ServerProcess:
    """Serves until a signal or the engine's death.

    Args:
        config: the server's settings.
        load: makes the application and its engine; leaving the context ends the engine.

    The first SIGTERM or SIGINT drains (serving-api 12): not ready at once, no new work, running
    requests go on for ``shutdown_timeout`` and then end with an error, the port stays open for
    ``drain_delay``. A second one ends everything now.
    """

    def __init__(
        self,
        config: ServerConfig,
        load: Callable[[], AbstractAsyncContextManager[tuple[Starlette, EngineProcess]]],
    ) -> None:
        self._config = config
        self._load = load
        self._door = Door()
        self._http = HttpServer(HttpConfig(self._door, config))
        self._stop = asyncio.Event()
        self._is_loaded = False
        self._num_signals = 0

    async def run(self, listener: socket.socket) -> None:
        """Serve on a bound socket.

        Raises:
            EngineDead: the engine ended by itself.
            KeyboardInterrupt: a second signal came.
            LeadlineError: whatever ``load`` raises.
        """
        _load_http(self._http.config)
        life = asyncio.ensure_future(self._live())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, life)
        http = asyncio.ensure_future(self._http.serve(sockets=[listener]))
        try:
            await life
        except asyncio.CancelledError:
            if self._num_signals > 1:
                raise KeyboardInterrupt from None
        finally:
            self._http.should_exit = True
            await http

    def _on_signal(self, life: asyncio.Future[None]) -> None:
        self._num_signals += 1
        if self._num_signals == 1 and self._is_loaded:
            self._stop.set()
        else:
            self._http.force_exit = True
            life.cancel()

    async def _live(self) -> None:
        async with self._load() as (app, engine), _refreshing(self._http.config, self._config):
            server: Server = app.state.server
            self._door.open(app)
            self._is_loaded = True
            watch = asyncio.ensure_future(self._watch(engine))
            stop = asyncio.ensure_future(self._stop.wait())
            try:
                await asyncio.wait({watch, stop}, return_when=asyncio.FIRST_COMPLETED)
                if watch.done():
                    watch.result()
            finally:
                watch.cancel()
                stop.cancel()
            await self._drain(server, engine)

    async def _watch(self, engine: EngineProcess) -> None:
        """Raise ``EngineDead`` once the engine is."""
        while True:
            await engine.health()
            await asyncio.sleep(_WATCH_SECONDS)

    async def _drain(self, server: Server, engine: EngineProcess) -> None:
        logger.info("shutting down; %d requests are open", server.admission.num_open)
        server.admission.is_draining = True
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(self._config.drain_delay))
            tasks.create_task(self._end_requests(server, engine))

    async def _end_requests(self, server: Server, engine: EngineProcess) -> None:
        try:
            await asyncio.wait_for(server.admission.idle(), self._config.shutdown_timeout)
        except TimeoutError:
            logger.warning("%d requests are cut short", server.admission.num_open)
            await engine.shutdown()  # which is what they are told
            await server.admission.idle()


def _load_http(config: HttpConfig | object) -> None:
    """Read certificates and what else can be wrong before the model is loaded."""
    assert isinstance(config, HttpConfig)
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"the certificate or its key cannot be used: {error}") from error


@contextlib.asynccontextmanager
async def _refreshing(http, config):  # type: ignore[no-untyped-def]
    yield
