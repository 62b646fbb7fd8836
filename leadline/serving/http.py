"""uvicorn, with the bounds that it lacks: heads of requests, readers that stand still, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from leadline.config.server import ServerConfig, TlsConfig

logger = logging.getLogger(__name__)

# A request's line and headers: bytes, and seconds until they are complete. As many bytes may
# come between two pieces of a body.
_MAX_HEAD_BYTES = 64 * 1024
_HEAD_SECONDS = 30.0
# Requests that wait on one connection for the answer to an earlier one.
_MAX_PIPELINED = 100
# Longer than clients keep idle connections (httpx: 5 s), so that they close them first.
_KEEP_ALIVE_SECONDS = 75
# Of the kernel, per connection.
SEND_BUFFER_BYTES = 256 * 1024
_TLS_REFRESH_SECONDS = 10.0


class HttpConfig(uvicorn.Config):
    """uvicorn's settings from ours.

    Args:
        app: what answers.
        config: the server's settings.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.stream_write_timeout = config.stream_write_timeout
        tls = config.tls
        super().__init__(
            app,
            interface="asgi3",
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            root_path=config.root_path,
            forwarded_allow_ips=config.forwarded_allow_ips,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            # Requests are ended before that; this is for connections that do not close.
            timeout_graceful_shutdown=math.ceil(config.shutdown_timeout) + 5,
            ssl_certfile=tls.ssl_certfile,
            ssl_keyfile=tls.ssl_keyfile,
            ssl_ca_certs=tls.ssl_ca_certs,
            ssl_cert_reqs=tls.ssl_cert_reqs,
            ssl_ciphers=tls.ssl_ciphers,
        )

    def load(self) -> None:
        """Read certificates as well."""
        super().load()
        if self.ssl is not None:
            self.ssl.minimum_version = ssl.TLSVersion.TLSv1_2


class HttpServer(uvicorn.Server):
    """uvicorn's server, which leaves signals to others."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: what a signal means is decided in ``serving.run``."""
        yield


class GuardedProtocol(HttpToolsProtocol):
    """HTTP/1.1 that gives up on clients who never finish a request's head or read no answer."""

    config: HttpConfig
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    # Since the last head or piece of a body: heads, and what frames bodies.
    _num_loose_bytes = 0
    _answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_stall()
        self._hang_up()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_loose_bytes += len(data)
        super().data_received(data)
        if self._num_loose_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                b"content-length: 0\r\nconnection: close\r\n\r\n"
            )

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(msg), msg.encode())
        )

    def on_message_begin(self) -> None:
        if len(self.pipeline) > _MAX_PIPELINED:
            raise OverflowError(f"more than {_MAX_PIPELINED} requests wait")  # ends in a refusal
        super().on_message_begin()
        self._start_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers are dropped: nobody reads them, and they have no bound."""
        if self._head_timer is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_head()
        self._num_loose_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_loose_bytes = 0
        super().on_body(body)

    def pause_writing(self) -> None:
        """The reader is behind; its request is aborted unless it catches up (C48)."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(
            self.config.stream_write_timeout, self.transport.abort
        )

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _hang_up(self) -> None:
        """Tell what is being answered that nobody listens.

        uvicorn tells the request that came last, which may still wait behind that one.
        """
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _refuse(self, answer: bytes) -> None:
        """Close the connection, with an answer unless that would cut into another one."""
        running = self._answering
        self._hang_up()  # before it writes to what is closed
        if running is not None and running.response_started and not running.response_complete:
            self.transport.abort()
        else:
            self.transport.write(answer)
            self.transport.close()

    def _start_head(self) -> None:
        self._end_head()
        self._head_timer = self.loop.call_later(_HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:  # it was sent behind a request whose answer still runs
            self._start_head()

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


async def refresh_certificates(
    context: ssl.SSLContext, config: TlsConfig, *, seconds: float = _TLS_REFRESH_SECONDS
) -> None:
    """Read certificate and key again whenever one of the files changes, until cancelled."""
    assert config.ssl_certfile is not None
    files = [Path(file) for file in (config.ssl_certfile, config.ssl_keyfile) if file]
    known: Any = [file.stat().st_mtime_ns for file in files]
    while True:
        await asyncio.sleep(seconds)
        try:
            times = [file.stat().st_mtime_ns for file in files]
            if times != known:
                # Tried elsewhere first: a context loses its key to a certificate of another one.
                for target in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                    target.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
                known = times
                logger.info("certificates were read again")
        except (OSError, ssl.SSLError) as error:
            # Half-written files are complete at the next look; the old ones serve until then.
            logger.warning("certificates could not be read again: %s", error)
