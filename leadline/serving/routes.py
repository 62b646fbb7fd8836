"""The paths of inference and of the tokenizer (serving-api 4)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from leadline.serving.anthropic.messages import count_tokens, messages
from leadline.serving.openai.chat import chat_completions
from leadline.serving.openai.completions import completions
from leadline.serving.openai.tokenize import detokenize, tokenize, tokenizer_info
from leadline.serving.responses.endpoints import cancel_response, create_response, get_response

Endpoint = Callable[[Request], Awaitable[Response]]

# DeepSeek's base URL for Anthropic's clients is served too.
_MESSAGES = ("/v1/messages", "/anthropic/v1/messages")


def inference_routes(admitted: Sequence[Middleware] = ()) -> list[Route]:
    """What clients ask of the model.

    Args:
        admitted: middleware of the endpoints that generate.
    """
    return [
        *both("/chat/completions", chat_completions, "POST", admitted),
        *both("/completions", completions, "POST", admitted),
        *both("/responses", create_response, "POST", admitted),
        *both("/responses/{response_id}", get_response),
        *both("/responses/{response_id}/cancel", cancel_response, "POST"),
        *(Route(path, messages, methods=["POST"], middleware=admitted) for path in _MESSAGES),
        *(Route(f"{path}/count_tokens", count_tokens, methods=["POST"]) for path in _MESSAGES),
        *both("/tokenize", tokenize, "POST"),
        *both("/detokenize", detokenize, "POST"),
        *both("/tokenizer_info", tokenizer_info),
    ]


def both(
    path: str, endpoint: Endpoint, method: str = "GET", middleware: Sequence[Middleware] = ()
) -> list[Route]:
    """With and without ``/v1``: users paste either base URL."""
    return [
        Route(prefix + path, endpoint, methods=[method], middleware=middleware)
        for prefix in ("/v1", "")
    ]
