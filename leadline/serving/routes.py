"""The paths of inference and of the tokenizer (serving-api 4)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from leadline.serving.openai.chat import chat_completions
from leadline.serving.openai.completions import completions

Endpoint = Callable[[Request], Awaitable[Response]]


def inference_routes(admitted: Sequence[Middleware] = ()) -> list[Route]:
    """What clients ask of the model.

    Args:
        admitted: middleware of the endpoints that generate.
    """
    return [
        *both("/chat/completions", chat_completions, "POST", admitted),
        *both("/completions", completions, "POST", admitted),
    ]


def both(
    path: str, endpoint: Endpoint, method: str = "GET", middleware: Sequence[Middleware] = ()
) -> list[Route]:
    """With and without ``/v1``: users paste either base URL."""
    return [
        Route(prefix + path, endpoint, methods=[method], middleware=middleware)
        for prefix in ("/v1", "")
    ]
