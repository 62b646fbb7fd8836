"""The life of a server process: port first, then the model, then requests, then a quiet end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from leadline.config.server import ServerConfig
from leadline.core.client import EngineClient
from leadline.core.errors import ConfigError, EngineDead
from leadline.serving.admission import Admission
from leadline.serving.app import starting_app
from leadline.serving.http import SEND_BUFFER_BYTES, HttpConfig, HttpServer, refresh_certificates

logger = logging.getLogger(__name__)

# Seconds before an engine is started again, by how often in a row it died soon after its start.
_RESTART_DELAYS = (0.0, 1.0, 5.0, 15.0, 60.0)
_SOON_SECONDS = 60.0


class EngineProcess(EngineClient, Protocol):
    """An engine that whoever runs the server also starts again and ends.

    Attributes:
        died: set when it ends by itself, until ``restart`` has replaced it.
    """

    died: asyncio.Event

    async def restart(self) -> None:
        """Put a new one in the place of one that died; raises when it cannot start."""
        ...

    async def shutdown(self) -> None:
        """End it; open requests fail with ``EngineDead``. May be called twice."""
        ...


Load = Callable[[], AbstractAsyncContextManager[tuple[Starlette, EngineProcess]]]


class ServerProcess:
    """Serves until a signal or the engine's death.

    The first SIGTERM or SIGINT drains (serving-api 12): not ready at once, no new work, running
    requests go on for ``shutdown_timeout`` and then end with an error, the port stays open for
    ``drain_delay``. A second one, or one while the model is being loaded, ends everything now.

    Args:
        config: the server's settings.
        load: makes the application and its engine; leaving the context ends the engine.

    Raises:
        ConfigError: certificates that cannot be used.
    """

    def __init__(self, config: ServerConfig, load: Load) -> None:
        self._config = config
        self._load = load
        self._app = starting_app()
        self._http_config = HttpConfig(self._answer, config)
        try:
            self._http_config.load()
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"the certificate or its key cannot be used: {error}") from error
        self._http = HttpServer(self._http_config)
        self._stop = asyncio.Event()
        self._is_open = False
        self._num_signals = 0

    async def run(self, listener: socket.socket) -> None:
        """Serve on a bound socket.

        Raises:
            EngineDead: the engine ended by itself.
            KeyboardInterrupt: a second signal came.
            LeadlineError: whatever ``load`` raises.
        """
        # A reader that stands still is noticed when this is full, not megabytes later (C48).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        life = asyncio.ensure_future(self._live())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, life)
        others: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._http.serve(sockets=[listener]))
        ]
        if self._http_config.ssl is not None and self._config.tls.enable_ssl_refresh:
            refresh = refresh_certificates(self._http_config.ssl, self._config.tls)
            others.append(asyncio.ensure_future(refresh))
        try:
            await life
        except asyncio.CancelledError:
            if self._num_signals > 1:
                raise KeyboardInterrupt from None
        finally:
            self._http.should_exit = True
            await others[0]
            for other in others[1:]:
                other.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def _on_signal(self, life: asyncio.Future[None]) -> None:
        self._num_signals += 1
        if self._num_signals == 1 and self._is_open:
            self._stop.set()
        else:
            self._http.force_exit = True
            life.cancel()

    async def _live(self) -> None:
        async with self._load() as (app, engine):
            self._app = app
            self._is_open = True
            await self._until_told(engine)
            await self._drain(app.state.server.admission, engine)

    async def _until_told(self, engine: EngineProcess) -> None:
        """Wait for a signal; raises ``EngineDead`` when the engine is lost before."""
        told = asyncio.ensure_future(self._stop.wait())
        care = asyncio.ensure_future(self._look_after(engine))
        try:
            await asyncio.wait({told, care}, return_when=asyncio.FIRST_COMPLETED)
            if care.done():
                care.result()
        finally:
            told.cancel()
            care.cancel()

    async def _look_after(self, engine: EngineProcess) -> None:
        clock = asyncio.get_running_loop().time
        num_deaths = 0
        while True:
            start = clock()
            await engine.died.wait()
            if not self._config.auto_restart:
                raise EngineDead("the engine process ended by itself; the log above may say why")
            if clock() - start > _SOON_SECONDS:
                num_deaths = 0
            delay = _RESTART_DELAYS[min(num_deaths, len(_RESTART_DELAYS) - 1)]
            num_deaths += 1
            logger.error("the engine process ended by itself; it starts again in %g s", delay)
            await asyncio.sleep(delay)
            await engine.restart()

    async def _drain(self, admission: Admission, engine: EngineProcess) -> None:
        logger.info("shutting down; %d requests are open", admission.num_open)
        admission.is_draining = True
        await asyncio.gather(
            asyncio.sleep(self._config.drain_delay), self._end_requests(admission, engine)
        )

    async def _end_requests(self, admission: Admission, engine: EngineProcess) -> None:
        try:
            await asyncio.wait_for(admission.idle(), self._config.shutdown_timeout)
        except TimeoutError:
            logger.warning("%d requests are cut short", admission.num_open)
            await engine.shutdown()  # which is what their clients are told
