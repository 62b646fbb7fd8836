"""``AsyncEngine``: the ``EngineClient`` of an engine in a process of its own. No torch here.

The process may end at any time, and may be replaced (``died``, ``restart``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from leadline.config.engine import EngineConfig
from leadline.core.client import EngineStats
from leadline.core.errors import BadRequest, EngineDead, LeadlineError
from leadline.core.pace import Pace
from leadline.core.request import EngineRequest, TokenOutput
from leadline.engine.limits import RequestLimits
from leadline.engine.link import EngineLink
from leadline.engine.process import Abort, Call, Outputs, PromptLogits, Rejected, Reply, Submit

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

BUILD_ENGINE = "leadline.engine.launch:build_engine"
# Seconds that a scrape of the metrics waits for a step to end.
STATS_SECONDS = 0.25


class _Stream:
    """What an open request has got and nobody has read yet; one output however slow the reader."""

    def __init__(self) -> None:
        self._news: TokenOutput | LeadlineError | None = None
        self._changed = asyncio.Event()

    def put(self, news: TokenOutput | LeadlineError) -> None:
        unread = self._news
        if isinstance(unread, LeadlineError):
            return  # nothing counts behind it, though outputs may still have been on their way
        if isinstance(unread, TokenOutput):
            if unread.finish_reason is not None:
                return  # that was its last word; the engine's end does not concern it
            if isinstance(news, TokenOutput):
                news = dataclasses.replace(
                    news,
                    token_ids=unread.token_ids + news.token_ids,
                    logprobs=unread.logprobs + news.logprobs,
                    prompt_logprobs=unread.prompt_logprobs + news.prompt_logprobs,
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

    Attributes:
        limits: what the engine can serve.
        died: set when the process ends by itself, until ``restart`` has replaced it.
    """

    limits: RequestLimits
    _link: EngineLink

    def __init__(self, config: EngineConfig, factory: str) -> None:
        self.died = asyncio.Event()
        self._config, self._factory = config, factory
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, _Stream] = {}
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._call_numbers = itertools.count()
        self._death: str | None = None
        self._is_shut_down = False
        self._ends = Pace(self._loop.time)
        self._stats = EngineStats()
        self._last_news = self._loop.time()  # or since when news are to be expected

    @property
    def pid(self) -> int:
        """The operating system's number of the engine process."""
        return self._link.pid

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
        engine = cls(config, factory)
        await engine._connect()
        return engine

    async def restart(self) -> None:
        """Put a new process in the place of one that has died; open requests have failed.

        Until it is ready, requests fail with ``EngineDead``. Its counters start at 0.

        Raises:
            LeadlineError: the engine could not start again (``start``).
        """
        assert self.died.is_set()
        await self._link.stop()
        await self._connect()
        self._death = None
        self.died.clear()

    async def _connect(self) -> None:
        self._link, ready = await EngineLink.start(
            self._config, self._factory, on_message=self._receive, on_end=self._end
        )
        self.limits, self._stats = ready.limits, ready.stats

    async def shutdown(self) -> None:
        """End the process; open requests fail with ``EngineDead``. May be called twice."""
        self._is_shut_down = True
        self._die("the engine was shut down")
        await self._link.stop()

    def submit(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        """Check a request now; the iterator queues it when it is first read (``EngineClient``)."""
        self._check_alive()
        self.limits.check(request)
        self.limits.check_room(len(self._streams), self._ends)
        return self._outputs(request)

    async def _outputs(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        self._check_alive()
        if request.request_id in self._streams:
            raise BadRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if not self._streams:
            self._last_news = self._loop.time()
        stream = self._streams[request.request_id] = _Stream()
        has_ended = False
        try:
            self._link.send(Submit(request))
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
            self._ends.count()
            if not has_ended:
                self._link.send(Abort(request.request_id))

    async def abort(self, request_id: str) -> None:
        self._link.send(Abort(request_id))

    async def stats(self) -> EngineStats:
        """The engine's counters and gauges, or the last known ones where a step takes long."""
        try:
            async with asyncio.timeout(STATS_SECONDS):
                self._stats = await self._call("stats")
        except TimeoutError:
            stalled = self._loop.time() - self._last_news if self._streams else 0.0
            self._stats = dataclasses.replace(self._stats, stalled_seconds=stalled)
        return self._stats

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
            self._link.send(Abort(request_id))
            raise
        return logits

    async def _call(self, method: str, *args: object) -> Any:
        call_id = f"{method}-{next(self._call_numbers)}"
        return await self._ask(call_id, Call(call_id, method, args))

    async def _ask(self, call_id: str, message: object) -> Any:
        """Send a message and wait for the ``Reply`` with its id."""
        self._check_alive()
        answer = self._calls[call_id] = self._loop.create_future()
        try:
            self._link.send(message)
            return await answer
        finally:
            del self._calls[call_id]

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDead(self._death)

    def _end(self, exit_code: int | None) -> None:
        self._die(f"the engine process ended (exit code {exit_code})")
        if not self._is_shut_down:
            self.died.set()

    def _receive(self, message: object) -> None:
        """Hand a message to who waits for it; what nobody waits for any more is dropped."""
        self._last_news = self._loop.time()
        match message:
            case Outputs(outputs):
                for output in outputs:
                    self._deliver(output.request_id, output.refusal or output)
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
