"""``/v1/responses``: create, read and cancel (serving-api 7)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from leadline.core.errors import BadRequest
from leadline.serving.context import caller_of
from leadline.serving.endpoint import json_response, respond
from leadline.serving.responses.answer import ResponsesAnswer
from leadline.serving.responses.store import ResponseStore, Stored


async def create_response(http: Request) -> Response:
    """Answer a request, whole, as a stream, or with a response to be read later."""
    store = _store_of(http)
    return await respond(
        http, lambda server, raw, caller: ResponsesAnswer(server, raw, caller, store)
    )


async def get_response(http: Request) -> Response:
    """A stored response."""
    return json_response(_stored(http).response)


async def cancel_response(http: Request) -> Response:
    """End a response that is generated in the background; a finished one stays as it is."""
    stored = _stored(http)
    if stored.task is not None and not stored.task.done():
        stored.task.cancel()
        stored.response["status"] = "cancelled"
    return json_response(stored.response)


def _store_of(http: Request) -> ResponseStore | None:
    store: ResponseStore | None = http.app.state.responses
    return store


def _stored(http: Request) -> Stored:
    response_id = http.path_params["response_id"]
    store = _store_of(http)
    stored = store.get(response_id, caller_of(http).key) if store is not None else None
    if stored is None:
        raise BadRequest(
            f"the response {response_id!r} does not exist (any more); this server keeps responses "
            "only with --enable-responses-store, and only for a while",
            param="response_id",
            code="response_not_found",
        )
    return stored
