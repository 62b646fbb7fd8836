"""What every endpoint works with: the engine's door, the text side, the model's names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from leadline.config.server import ServerConfig
from leadline.core.client import EngineClient
from leadline.core.errors import BadRequest
from leadline.core.request import EngineRequest
from leadline.serving.logs import Event
from leadline.serving.metrics import ServingMetrics
from leadline.serving.request_record import RequestRecord
from leadline.serving.tracing import Tracer
from leadline.text.encoding import ChatEncoder
from leadline.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Below this many bytes, decoding and tokenising take less than handing them to a thread gains.
_SMALL_BODY = 16 * 1024


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What clients may know of the model.

    Attributes:
        root: the checkpoint's base name or hub id.
        max_model_len: tokens of prompt and answer together.
        vocab_size: the model's, which may be larger than the tokenizer's.
    """

    root: str
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as far as headers say it (serving-api 12, 13).

    Attributes:
        request_id: what the ``X-Request-Id`` header and the log show.
        tenant: salt of the key where ``--cache-isolation`` asks for one.
        rank: the data parallel rank that a header names.
        session_id: header ``X-Session-ID``.
        affinity: of the headers that name a session in other words.
        timeout_seconds: until an unfinished request ends; None is no limit.
        isolates_users: ``--cache-isolation user``.
    """

    request_id: str
    tenant: str | None = None
    rank: int | None = None
    session_id: str | None = None
    affinity: str | None = None
    timeout_seconds: float | None = None
    isolates_users: bool = False

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
        owner = user if self.isolates_users else self.tenant
        return given if owner is None else f"{owner}@{given or ''}"  # no client's salt has an @


class Server:
    """The parts of one API process; ``http.app.state.server`` in every endpoint."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, model: ModelInfo, config: ServerConfig
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.encoder = ChatEncoder(tokenizer)
        self.model = model
        self.config = config
        self.model_names = config.served_model_name or (model.root.rstrip("/").split("/")[-1],)
        self.created = int(time.time())
        telemetry = config.telemetry
        self.metrics = ServingMetrics(self.model_names[0], telemetry.metrics_prefix)
        endpoint = telemetry.otlp_traces_endpoint
        self.tracer = None if endpoint is None else Tracer(endpoint)

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
                f"the model {name!r} does not exist; this server has {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )
        return served

    def check_prompt(self, num_tokens: int, *, param: str) -> None:
        """Raise ``BadRequest`` when a prompt leaves no room for a token (C54)."""
        if num_tokens >= self.model.max_model_len:
            raise BadRequest(
                f"this model's maximum context length is {self.model.max_model_len} tokens, but "
                f"the prompt has {num_tokens} tokens and needs room for at least one more; "
                f"shorten {param}",
                param=param,
                code="context_length_exceeded",
            )


async def prepare(raw: bytes, work: Callable[[], T]) -> T:
    """Decode and tokenise a request; a large one in a thread, so that streams go on (C53)."""
    return work() if len(raw) <= _SMALL_BODY else await asyncio.to_thread(work)


def server_of(http: Request) -> Server:
    """The server that an endpoint belongs to."""
    server: Server = http.app.state.server
    return server


def caller_of(http: Request) -> Caller:
    """Who asks, from the request's headers."""
    return Caller(
        request_id=http.scope["state"]["request_id"],
        session_id=http.headers.get("x-session-id"),
    )
