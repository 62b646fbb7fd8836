"""A running engine process, seen from the client: its pipe, and its end. No torch here.

Two threads keep the pipe moving, so that neither a long step nor a full pipe blocks the event
loop: one sends, one receives and hands every message to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from leadline.config.engine import EngineConfig
from leadline.core.errors import EngineDead
from leadline.engine.process import Failed, Ready, run_engine_process

# Seconds that a process told to end may take before it is killed.
TERMINATE_SECONDS = 5.0


class EngineLink:
    """One engine process; made by ``start``, belongs to the event loop that it was started on.

    Args:
        process: it has said ``Ready``.
        connection: this end of its pipe.
        on_message: called in the loop with every message of the process.
        on_end: called in the loop once, after the last message, with the exit code.
    """

    def __init__(
        self,
        process: SpawnProcess,
        connection: Connection,
        *,
        on_message: Callable[[object], None],
        on_end: Callable[[int | None], None],
    ) -> None:
        self._process = process
        self._connection = connection
        self._on_message, self._on_end = on_message, on_end
        self._loop = asyncio.get_running_loop()
        self._outbox: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, daemon=True)
        self._sender.start()
        self._receiver.start()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        factory: str,
        *,
        on_message: Callable[[object], None],
        on_end: Callable[[int | None], None],
    ) -> tuple[EngineLink, Ready]:
        """Start a process and wait until it is ready.

        Raises:
            LeadlineError: it could not start (``AsyncEngine.start``).
        """
        context = multiprocessing.get_context("spawn")
        connection, far_end = context.Pipe()
        process = context.Process(
            target=run_engine_process,
            args=(far_end, config, factory),
            name="leadline-engine",
            daemon=True,
        )
        process.start()
        # The process holds its own copy; with this one open its end would never be seen.
        far_end.close()
        try:
            message = await asyncio.to_thread(_first_message, process, connection)
        except BaseException:
            _end(process)
            raise
        if isinstance(message, Failed):
            process.join()
            connection.close()
            raise message.error
        return cls(process, connection, on_message=on_message, on_end=on_end), message

    @property
    def pid(self) -> int:
        """The operating system's number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def send(self, message: object) -> None:
        """Put a message into the pipe; dropped when the process has ended.

        Raises:
            Exception: it holds something that cannot be pickled; nothing was sent.
        """
        self._outbox.put(ForkingPickler.dumps(message))

    async def stop(self) -> None:
        """End the process, if it has not ended itself, and the threads. May be called twice."""
        self._process.terminate()
        await asyncio.to_thread(self._receiver.join, TERMINATE_SECONDS)
        self._process.kill()  # if it did not listen
        await asyncio.to_thread(self._receiver.join)
        await asyncio.to_thread(self._sender.join)
        self._connection.close()

    def _send_all(self) -> None:
        """Sender thread: the outbox into the pipe, until None or the pipe breaks."""
        with contextlib.suppress(OSError):  # the receiver tells of the end
            while (message := self._outbox.get()) is not None:
                self._connection.send_bytes(message)

    def _receive_all(self) -> None:
        """Receiver thread: messages to the event loop, until the process has ended."""
        try:
            while True:
                self._to_loop(self._on_message, self._connection.recv())
        except (EOFError, OSError):
            self._outbox.put(None)
            self._process.join()
            self._to_loop(self._on_end, self._process.exitcode)

    def _to_loop(self, function: Callable[[Any], None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function, argument)


def _first_message(process: SpawnProcess, connection: Connection) -> Ready | Failed:
    """Wait for ``Ready`` or ``Failed``; the process may also end without a word."""
    try:
        message: Ready | Failed = connection.recv()
    except (EOFError, OSError):
        process.join()
        reason = f"the engine process ended while it started (exit code {process.exitcode})"
        return Failed(EngineDead(reason))
    return message


def _end(process: SpawnProcess) -> None:
    """Terminate a process, and kill it when it does not listen."""
    process.terminate()
    process.join(TERMINATE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
