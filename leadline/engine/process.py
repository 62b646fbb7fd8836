"""The engine's own process: what crosses the pipe, and the loop on its far side. No torch here.

One duplex pipe carries pickled messages. The engine reads it between steps, and waits on it when
it has nothing to do; the outputs of a step travel in one message.
"""

from __future__ import annotations

import importlib
import logging
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from leadline.config.engine import EngineConfig
from leadline.core.client import EngineStats
from leadline.core.errors import EngineDead, LeadlineError
from leadline.core.request import EngineRequest, TokenOutput
from leadline.engine.limits import RequestLimits

if TYPE_CHECKING:
    from leadline.engine.engine import Engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """To the client: the engine has started."""

    limits: RequestLimits
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Failed:
    """To the client: the engine could not start, and its process ends."""

    error: LeadlineError


@dataclass(frozen=True, slots=True)
class Submit:
    """To the engine: a request; answered by outputs or ``Rejected``."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Rejected:
    """To the client: the engine does not take this request."""

    request_id: str
    error: LeadlineError


@dataclass(frozen=True, slots=True)
class Outputs:
    """To the client: what is new after a step."""

    outputs: list[TokenOutput]


@dataclass(frozen=True, slots=True)
class Abort:
    """To the engine: end a request; not answered."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PromptLogits:
    """To the engine: a prompt whose logits are wanted; answered by ``Reply``."""

    request_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """To the engine: run one of its methods; answered by ``Reply``."""

    call_id: str
    method: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """To the client: the value of a ``Call`` or ``PromptLogits``, or the error it raised."""

    call_id: str
    value: Any


def run_engine_process(connection: Connection, config: EngineConfig, factory: str) -> None:
    """Build an engine and serve it until the other end of the pipe closes.

    Args:
        connection: the engine's end.
        config: handed to the factory.
        factory: ``module:function``, ``EngineConfig`` -> ``Engine``; sets up logging too, if it is
            wanted.
    """
    # Ctrl-C reaches the whole process group; when to stop is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # And when it says so, end as Python programs end: what libraries hold is given back.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    module, _, function = factory.partition(":")
    try:
        build: Callable[[EngineConfig], Engine] = getattr(importlib.import_module(module), function)
        engine = build(config)
    except LeadlineError as error:
        connection.send(Failed(error))
        return
    except Exception as error:
        # Errors of other libraries may not survive pickling; their traceback stays here.
        logger.exception("the engine could not start")
        message = f"the engine could not start: {type(error).__name__}: {error}"
        connection.send(Failed(EngineDead(message)))
        return
    connection.send(Ready(engine.limits, engine.stats()))
    try:
        _serve(connection, engine)
    except (EOFError, OSError):
        logger.debug("the client has gone; the engine process ends")


def _serve(connection: Connection, engine: Engine) -> None:
    """Read what has come, step, tell; EOFError or OSError when the client is gone."""
    bell, bell_rope = socket.socketpair()  # rung by threads that have compiled a grammar
    with bell, bell_rope:
        engine.notify(lambda: bell_rope.sendall(b"!"))
        while True:
            while ready := wait([connection, bell], engine.idle_seconds()):
                if bell in ready:
                    bell.recv(4096)
                if connection in ready:
                    _obey(connection, engine, connection.recv())
            if outputs := engine.step():
                connection.send(Outputs(outputs))


def _obey(connection: Connection, engine: Engine, message: object) -> None:
    match message:
        case Submit(request):
            try:
                engine.add(request)
            except LeadlineError as error:
                connection.send(Rejected(request.request_id, error))
        case Abort(request_id):
            engine.abort(request_id)
        case PromptLogits(request_id, token_ids):
            try:
                engine.add_prompt_logits(
                    request_id,
                    token_ids,
                    lambda answer: connection.send(Reply(request_id, answer)),
                )
            except LeadlineError as error:
                connection.send(Reply(request_id, error))
        case Call(call_id, method, args):
            connection.send(Reply(call_id, getattr(engine, method)(*args)))
