"""A scripted server on a real socket, for clients that want one."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import uvicorn
from starlette.types import ASGIApp


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve on a free port in a thread; yields the URL, without a slash at its end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # before the thread does: nobody is refused
        port = listener.getsockname()[1]
        web = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            web.should_exit = True
            thread.join()


class Gate(asyncio.Event):
    """A ``ScriptedEngine.gate`` that another thread opens."""

    _loop: asyncio.AbstractEventLoop | None = None

    async def wait(self) -> Literal[True]:
        self._loop = asyncio.get_running_loop()
        return await super().wait()

    def open(self) -> None:
        """Let the engine go on; it must have come to the gate."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.set)
