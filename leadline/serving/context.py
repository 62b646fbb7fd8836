"""What every endpoint works with: the engine's door, the text side, the model's names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from leadline.config.server import ServerConfig
from leadline.core.client import EngineClient
from leadline.core.errors import BadRequest
from leadline.serving.metrics import ServingMetrics
from leadline.text.encoding import ChatEncoder
from leadline.text.tokenizer import Tokenizer

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
        self.metrics = ServingMetrics(self.model_names[0])

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


def request_id_of(http: Request) -> str:
    """The id that goes into the ``X-Request-Id`` header and the log."""
    request_id: str = http.scope["state"]["request_id"]
    return request_id
