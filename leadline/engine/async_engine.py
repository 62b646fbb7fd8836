"""``AsyncEngine``: the ``EngineClient`` of an engine in a process of its own. No torch here.

Two threads keep the pipe moving, so that neither a long step nor a long prompt blocks the event
loop: one sends, one receives and hands every message to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import multiprocessing
import queue
import threading
from collections.abc import AsyncGenerator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any

from leadline.config.engine import EngineConfig
from leadline.core.client import EngineStats
from leadline.core.errors import BadRequest, EngineDead, LeadlineError, NotSupported
from leadline.core.request import EngineRequest, TokenOutput
from leadline.engine.limits import RequestLimits
from leadline.engine.process import (
    Abort,
    Call,
    Failed,
    Outputs,
    PromptLogits,
    Ready,
    Rejected,
    Reply,
    Submit,
    run_engine_process,
)

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

BUILD_ENGINE = "leadline.engine.launch:build_engine"
# Seconds that a process told to end may take before it is killed.
TERMINATE_SECONDS = 5.0


class _Stream:
    """What an open request has got and nobody has read yet; one output however slow the reader."""

    def __init__(self) -> None:
        self._news: TokenOutput | LeadlineError | None = None
        self._changed = asyncio.Event()

    def put(self, news: TokenOutput | LeadlineError) -> None:
        unread = self._news
        if isinstance(unread, TokenOutput):
            if unread.finish_reason is not None:
                return  # that was its last word; the engine's end does not concern it
            if isinstance(news, TokenOutput):
                news = dataclasses.replace(
                    news,
                    token_ids=unread.token_ids + news.token_ids,
                    logprobs=unread.logprobs + news.logprobs,
                )
        self._news = news
        self._changed.set()

    async def get(self) -> TokenOutput:
        await self._changed.wait()
        self._changed.clear()
        news, self._news = self._news, None
        if isinstance(news, LeadlineError):
            raise news
        assert news is not None
        return news


class AsyncEngine:
    """Client of one engine process; implements ``core.client.EngineClient``.

    Made by ``start``; belongs to the event loop that it was started on.
    """

    def __init__(
        self, process: SpawnProcess, connection: Connection, limits: RequestLimits
    ) -> None:
        self.limits = limits
        self._process = process
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, _Stream] = {}
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._call_numbers = itertools.count()
        self.died = asyncio.Event()
        self._death: str | None = None
        self._outbox: queue.SimpleQueue[object | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, daemon=True)
        self._sender.start()
        self._receiver.start()

    @property
    def pid(self) -> int:
        """The operating system's number of the engine process."""
        assert self._process.pid is not None
        return self._process.pid

    @classmethod
    async def start(cls, config: EngineConfig, *, factory: str = BUILD_ENGINE) -> AsyncEngine:
        """Start the engine process and wait until it is ready.

        Args:
            config: handed to the factory in the new process.
            factory: ``module:function``, ``EngineConfig`` -> ``Engine``.

        Raises:
            LeadlineError: the engine could not start; the error that it met itself where that is
                one of ours (``ConfigError``, ``CheckpointError`` ...), else ``EngineDead``.
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
        return cls(process, connection, message.limits)

    async def restart(self) -> None:
        """Start the process again.

        Raises:
            NotSupported: always, for now.
        """
        raise NotSupported("starting the engine process again does not exist yet")

    async def shutdown(self) -> None:
        """End the process; open requests fail with ``EngineDead``. May be called twice."""
        self._die("the engine was shut down")
        self._process.terminate()
        await asyncio.to_thread(self._receiver.join, TERMINATE_SECONDS)
        self._process.kill()  # if it did not listen
        await asyncio.to_thread(self._receiver.join)
        await asyncio.to_thread(self._sender.join)
        self._connection.close()

    def submit(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        """Check a request now; the iterator queues it when it is first read (``EngineClient``)."""
        self._check_alive()
        self.limits.check(request)
        self.limits.check_room(len(self._streams))
        return self._outputs(request)

    async def _outputs(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        self._check_alive()
        if request.request_id in self._streams:
            raise BadRequest(f"request id {request.request_id!r} is in use", param="request_id")
        stream = self._streams[request.request_id] = _Stream()
        self._outbox.put(Submit(request))
        has_ended = False
        try:
            while not has_ended:
                try:
                    output = await stream.get()
                except LeadlineError:
                    has_ended = True
                    raise
                has_ended = output.finish_reason is not None
                yield output
        finally:
            del self._streams[request.request_id]
            if not has_ended:
                self._outbox.put(Abort(request.request_id))

    async def abort(self, request_id: str) -> None:
        self._outbox.put(Abort(request_id))

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._call("stats")
        return stats

    async def health(self) -> None:
        await self._call("stats")  # any answer will do

    async def pause(self, paused: bool) -> None:
        await self._call("pause", paused)

    async def reset_prefix_cache(self) -> bool:
        is_empty: bool = await self._call("reset_prefix_cache")
        return is_empty

    async def prompt_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        self.limits.check_prompt(token_ids, num_new=0)
        request_id = f"prompt-logits-{next(self._call_numbers)}"
        try:
            logits: np.ndarray = await self._ask(
                request_id, PromptLogits(request_id, tuple(token_ids))
            )
        except asyncio.CancelledError:
            self._outbox.put(Abort(request_id))
            raise
        return logits

    async def _call(self, method: str, *args: object) -> Any:
        call_id = f"{method}-{next(self._call_numbers)}"
        return await self._ask(call_id, Call(call_id, method, args))

    async def _ask(self, call_id: str, message: object) -> Any:
        """Send a message and wait for the ``Reply`` with its id."""
        self._check_alive()
        answer = self._calls[call_id] = self._loop.create_future()
        self._outbox.put(message)
        try:
            return await answer
        finally:
            del self._calls[call_id]

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDead(self._death)

    def _send_all(self) -> None:
        """Sender thread: the outbox into the pipe, until None or the pipe breaks."""
        with contextlib.suppress(OSError):  # the receiver tells of the end
            while (message := self._outbox.get()) is not None:
                self._connection.send(message)

    def _receive_all(self) -> None:
        """Receiver thread: messages to the event loop, until the process has ended."""
        try:
            while True:
                self._to_loop(self._receive, self._connection.recv())
        except (EOFError, OSError):
            self._outbox.put(None)
            self._process.join()
            code = self._process.exitcode
            self._to_loop(self._end_by_itself, f"the engine process ended (exit code {code})")

    def _to_loop(self, function: Any, argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function, argument)

    def _receive(self, message: object) -> None:
        """Hand a message to who waits for it; what nobody waits for any more is dropped."""
        match message:
            case Outputs(outputs):
                for output in outputs:
                    self._deliver(output.request_id, output)
            case Rejected(request_id, error):
                self._deliver(request_id, error)
            case Reply(call_id, value):
                call = self._calls.get(call_id)
                if call is None or call.done():
                    logger.debug("a reply to %s, which nobody waits for", call_id)
                elif isinstance(value, LeadlineError):
                    call.set_exception(value)
                else:
                    call.set_result(value)

    def _deliver(self, request_id: str, news: TokenOutput | LeadlineError) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            logger.debug("an output for request %s, which nobody reads", request_id)
        else:
            stream.put(news)

    def _end_by_itself(self, reason: str) -> None:
        if self._death is None:
            self.died.set()
        self._die(reason)

    def _die(self, reason: str) -> None:
        """Fail whatever is open; the first reason stays."""
        if self._death is not None:
            return
        self._death = reason
        for stream in self._streams.values():
            stream.put(EngineDead(reason))
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDead(reason))


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
