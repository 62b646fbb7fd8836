"""Which generating requests come in: reserved before any work, released whatever happens.

The engine bounds sequences; this bounds requests, before their bodies are decoded and tokenised,
so that a refusal costs milliseconds (serving-api 11, 12; R12). A full server refuses before it
reads a body, but a place is taken only with the body's end: clients that send half a request
keep nobody out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leadline.core.errors import EngineOverloaded
from leadline.core.pace import Pace
from leadline.serving.dialect import error_response
from leadline.serving.rate_limit import KeyLimits, RateLimited, RateLimiter

_limits: ContextVar[KeyLimits | None] = ContextVar("limits", default=None)


def charge(num_tokens: int) -> None:
    """Take tokens off the allowance of the key whose request is being answered."""
    if limits := _limits.get():
        limits.charge(num_tokens)


class Admission:
    """The generating requests that are open.

    Args:
        max_open: at most so many; 0 is no bound.
        limiter: what one key may ask.

    Attributes:
        is_draining: the server shuts down and takes no more.
    """

    def __init__(self, max_open: int, limiter: RateLimiter) -> None:
        self.limiter = limiter
        self.num_open = 0
        self.is_draining = False
        self._max_open = max_open
        self._ends = Pace(time.monotonic)
        self._idle = asyncio.Event()
        self._idle.set()

    def check(self, limits: KeyLimits) -> None:
        """Look whether there is a place for one more request.

        Raises:
            EngineOverloaded: there is none, or the server shuts down.
            RateLimited: the key has used its share.
        """
        self._check_room()
        limits.check(self.limiter.now())

    def _check_room(self) -> None:
        if self.is_draining:
            raise EngineOverloaded("the server is shutting down", code="shutting_down")
        if self._max_open and self.num_open >= self._max_open:
            raise EngineOverloaded(
                f"{self.num_open} requests are open, and no more than {self._max_open} may be; "
                "try again later",
                retry_after=self._ends.seconds_for(1),
            )

    @contextmanager
    def reserve(self, limits: KeyLimits) -> Iterator[None]:
        """A place for one request, for as long as the block runs; raises as ``check`` does."""
        self._check_room()
        limits.start(self.limiter.now())
        with self._place(limits):
            yield

    @contextmanager
    def extend(self) -> Iterator[None]:
        """Keep the place of the request at hand for work that goes on behind its answer."""
        limits = _limits.get()
        assert limits is not None, "only an admitted request has a place"
        with self._place(limits):
            yield

    @contextmanager
    def _place(self, limits: KeyLimits) -> Iterator[None]:
        limits.num_open += 1
        self.num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            limits.num_open -= 1
            self.num_open -= 1
            self._ends.count()
            if not self.num_open:
                self._idle.set()

    async def idle(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()


class Admitted:
    """ASGI middleware of generating endpoints: nothing of them runs without a place.

    Every answer, a refusal too, tells what is left of the key's limits and who worked on it.

    Args:
        app: the endpoint.
        admission: where places come from.
        worker_id: replica and rank, for ``X-Worker-ID`` (serving-api 13.1).
    """

    def __init__(self, app: ASGIApp, admission: Admission, worker_id: str) -> None:
        self._app = app
        self._admission = admission
        self._worker_id = (b"x-worker-id", worker_id.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limiter = self._admission.limiter
        limits = limiter.of(scope["state"]["key"])

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = (self._worker_id, *limits.headers(limiter.now()))
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        place = ExitStack()

        async def receive_and_reserve() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                place.enter_context(self._admission.reserve(limits))
            return message

        try:
            self._admission.check(limits)
            with place:
                _limits.set(limits)
                await self._app(scope, receive_and_reserve, send_with_headers)
        except (EngineOverloaded, RateLimited) as refusal:
            await error_response(refusal, scope)(scope, receive, send_with_headers)
