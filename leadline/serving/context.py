"""What every endpoint works with: the engine's door, the text side, the model's names."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.requests import Request

from leadline.config.server import ServerConfig
from leadline.core.client import EngineClient, EngineStats
from leadline.core.errors import BadRequest, ConfigError, prompt_too_long
from leadline.core.request import EngineRequest
from leadline.serving.access import KeyRing
from leadline.serving.admission import Admission
from leadline.serving.body import BodyReader
from leadline.serving.logs import Event
from leadline.serving.metrics import ServingMetrics
from leadline.serving.rate_limit import RateLimiter
from leadline.serving.request_record import RequestRecord
from leadline.serving.tracing import Tracer
from leadline.text.encoding import ChatEncoder
from leadline.text.profiles import choose_profile
from leadline.text.sampling_defaults import with_generation_config
from leadline.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Bodies of the largest size that may be on their way at the same time.
_HELD_BODIES = 16

_MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What clients may know of the model.

    Attributes:
        root: the checkpoint's base name or hub id.
        max_model_len: tokens of prompt and answer together.
        vocab_size: the model's, which may be larger than the tokenizer's.
        max_open: requests that the engine takes, running or waiting; 0 is no bound.
        num_ranks: data parallel ranks, each with a prefix cache of its own.
    """

    root: str
    max_model_len: int
    vocab_size: int
    max_open: int = 0
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as far as headers say it (serving-api 12, 13).

    Attributes:
        request_id: what the ``X-Request-Id`` header and the log show.
        key: a name for the key of the request; empty without one.
        isolation: ``--cache-isolation``.
        may_hurry: whether requests may name a priority (``--scheduling-policy``).
        rank: the data parallel rank that a header names.
        session_id: header ``X-Session-ID``.
        affinity: of the headers that name a session in other words.
        timeout_seconds: until an unfinished request ends; None is no limit.
    """

    request_id: str
    key: str
    isolation: str
    may_hurry: bool = False
    rank: int | None = None
    session_id: str | None = None
    affinity: str | None = None
    timeout_seconds: float | None = None

    def session_key(
        self,
        *,
        session_id: str | None = None,
        prompt_cache_key: str | None = None,
        user: str | None = None,
    ) -> str | None:
        """The first affinity key that headers or these fields of the body name (13.1)."""
        names = (session_id, self.session_id, self.affinity, prompt_cache_key, user)
        return next((name for name in names if name), None)

    def cache_salt(self, given: str | None, user: str | None = None) -> str | None:
        """Who shares cached prefixes with this request: the same salt (13.2)."""
        owner = {"none": None, "api-key": self.key, "user": user}[self.isolation]
        return given if owner is None else f"{owner}@{given or ''}"  # no client's salt has an @


class Server:
    """The parts of one API process; ``http.app.state.server`` in every endpoint.

    Args:
        client: the engine.
        tokenizer: of the model.
        model: what clients may know of it.
        config: the server's settings.
        engine_settings: the engine's, as ``/server_info`` shows them.
        folder: the checkpoint, which decides the chat format (C6) and may bring sampling values;
            None is a V4.1 without files.

    Raises:
        ConfigError: an alias of no model, or keys or sampling values that cannot be read.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        model: ModelInfo,
        config: ServerConfig,
        engine_settings: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        config = replace(config, chat=with_generation_config(config.chat, folder))
        profile = choose_profile(config.chat.effort_profile, folder)
        self.encoder = ChatEncoder(tokenizer, profile, config.chat)
        self.model = model
        self.config = config
        served = config.served_model_name or (model.root.rstrip("/").split("/")[-1],)
        self.model_names = (*served, *_aliases(config.model_alias, served))
        self.engine_settings = engine_settings or {}
        self.created = int(time.time())
        self.worker_id = f"{uuid.uuid4().hex[:12]}-0"  # replica and rank
        self.keys = KeyRing(config.access)
        limiter = RateLimiter(config.access, per_key=not self.keys.is_empty)
        self.admission = Admission(model.max_open, limiter)
        limit = config.max_request_bytes
        self.bodies = BodyReader(limit, _HELD_BODIES * limit)
        telemetry = config.telemetry
        self.metrics = ServingMetrics(self.model_names[0], telemetry.metrics_prefix)
        endpoint = telemetry.otlp_traces_endpoint
        self.tracer = None if endpoint is None else Tracer(endpoint)
        self._stats: asyncio.Task[EngineStats] | None = None

    async def stats(self) -> EngineStats:
        """The engine's; whoever asks meanwhile gets the same answer, so that probes cost no steps.

        Raises:
            EngineDead: the engine process has ended.
        """
        if self._stats is None or self._stats.done():
            self._stats = asyncio.create_task(self.client.stats())
        return await asyncio.shield(self._stats)

    def record(self, request: EngineRequest, log_id: str) -> RequestRecord:
        """Start the clock of a request that is about to be submitted."""
        telemetry, decode = self.config.telemetry, self.tokenizer.decode
        if telemetry.enable_log_requests:
            fields = {"request_id": log_id, "id": request.request_id}
            prompt = decode(request.prompt_token_ids)
            logger.info(Event("prompt", {**fields, "text": prompt, "sampling": request.sampling}))
        return RequestRecord(
            self.metrics,
            request,
            log_id,
            span=None if self.tracer is None else self.tracer.start(request, log_id),
            decode=decode if telemetry.enable_log_outputs else None,
        )

    def resolve_model(self, name: str | None) -> str:
        """The name to echo for a requested model (serving-api 4).

        Raises:
            BadRequest: 404, the name is not served.
        """
        if not name:
            return self.model_names[0]
        # Coding agents add [1m] to ask for the long context; it is always there.
        served = name.removesuffix("[1m]")
        if served not in self.model_names:
            raise BadRequest(
                f"the model {name[:200]!r} does not exist; "
                f"this server has {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )
        return served

    def check_prompt(self, num_tokens: int, *, param: str) -> None:
        """Raise ``BadRequest`` when a prompt leaves no room for a token (C54)."""
        if num_tokens >= self.model.max_model_len:
            raise prompt_too_long(num_tokens, self.model.max_model_len, param=param)


def server_of(http: Request) -> Server:
    """The server that an endpoint belongs to."""
    server: Server = http.app.state.server
    return server


def caller_of(http: Request) -> Caller:
    """Who asks, from the request's headers.

    Raises:
        BadRequest: a header's value cannot be used.
    """
    server, headers = server_of(http), http.headers
    names = (headers.get(name) for name in server.config.session_affinity_headers)
    return Caller(
        request_id=http.scope["state"]["request_id"],
        key=http.scope["state"]["key"],
        isolation=server.config.access.cache_isolation,
        may_hurry=server.config.scheduling_policy == "priority",
        rank=_header_number(http, "X-data-parallel-rank", 0, server.model.num_ranks - 1),
        session_id=headers.get("x-session-id"),
        affinity=next((name for name in names if name), None),
        timeout_seconds=_timeout_seconds(http, server.config.request_timeout),
    )


def _timeout_seconds(http: Request, configured: float | None) -> float | None:
    """The shorter one of the server's deadline and the client's."""
    asked = _header_number(http, "X-Request-Timeout-Ms", 1, _MAX_TIMEOUT_MS)
    timeouts = [configured, None if asked is None else asked / 1000]
    return min((seconds for seconds in timeouts if seconds is not None), default=None)


def _header_number(http: Request, name: str, low: int, high: int) -> int | None:
    text = http.headers.get(name)
    if text is None:
        return None
    # Longer than any limit: int() itself refuses thousands of digits.
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and low <= int(text) <= high):
        raise BadRequest(
            f"{name} is {text!r}; it must be a whole number from {low} to {high}", param=name
        )
    return int(text)


def _aliases(given: Sequence[str], served: Sequence[str]) -> Iterator[str]:
    for alias in given:
        name, _, target = alias.partition("=")
        if target not in served:
            raise ConfigError(
                f"model_alias is {alias!r}, but the served names are {', '.join(served)}"
            )
        yield name
