"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info`` (serving-api 6).

Never limited by the context's length.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from leadline.core.errors import BadRequest
from leadline.serving.body import decode_body
from leadline.serving.chat_call import encode_query
from leadline.serving.context import Caller, Server, server_of
from leadline.serving.endpoint import reply
from leadline.serving.openai.chat_query import chat_query
from leadline.serving.openai.schema import ChatRequest
from leadline.serving.sampling import check_token_ids
from leadline.text.tokenizer import BOS, EOS


class TokenizeRequest(Struct):
    """A raw prompt; with ``messages`` the body is a chat's."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokens(Struct):
    """Ids of a prompt."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None


class DetokenizeRequest(Struct):
    """Ids whose text is asked for."""

    tokens: list[int]
    model: str | None = None


class Text(Struct):
    """Text of ids."""

    prompt: str


async def tokenize(http: Request) -> Response:
    """Ids of a raw prompt, or of exactly what a chat request would prefill (C32)."""
    return await reply(http, _tokenize)


async def detokenize(http: Request) -> Response:
    """Text of ids, markers included."""
    return await reply(http, _detokenize)


async def tokenizer_info(http: Request) -> Response:
    """What evaluation harnesses ask before they encode prompts here."""
    limit = server_of(http).model.max_model_len
    return JSONResponse({"bos_token": BOS, "eos_token": EOS, "model_max_length": limit})


def _tokenize(server: Server, raw: bytes, caller: Caller) -> Tokens:
    body = decode_body(raw, TokenizeRequest)
    if body.messages is not None:
        query = chat_query(decode_body(raw, ChatRequest))
        _, chat_prompt = encode_query(server, query, caller)
        token_ids = chat_prompt.token_ids
    elif body.prompt is not None:
        server.resolve_model(body.model)
        plain = body.add_special_tokens is False
        encode = server.tokenizer.encode if plain else server.tokenizer.encode_prompt
        token_ids = tuple(encode(body.prompt))
    else:
        raise BadRequest("the body has neither prompt nor messages", param="prompt")
    strings = None
    if body.return_token_strs:
        strings = [server.tokenizer.decode((token_id,)) for token_id in token_ids]
    return Tokens(len(token_ids), server.model.max_model_len, token_ids, strings)


def _detokenize(server: Server, raw: bytes, _caller: Caller) -> Text:
    body = decode_body(raw, DetokenizeRequest)
    server.resolve_model(body.model)
    check_token_ids(server, body.tokens, param="tokens")
    return Text(server.tokenizer.decode(body.tokens))
