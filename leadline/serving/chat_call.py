"""A chat in any dialect, from what a client asks to what the engine is asked.

A dialect turns its body into a ``ChatQuery``, and the steps of a ``ChatRun`` into its own events;
everything between is here and in ``serving.chat_run``, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from leadline.core.request import EngineRequest, SamplingParams, StructuredOutputs
from leadline.serving.context import Caller, Server
from leadline.serving.origin import Origin
from leadline.serving.sampling import kept_tokens, output_limit, sampling_params
from leadline.text import grammar
from leadline.text.chat import ChatInput, ChatPrompt
from leadline.text.sampling_defaults import default_chat_limit, thinking_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatQuery:
    """What a client asks, whatever the dialect.

    Attributes:
        model: the name as sent.
        sampling: the ``SamplingParams`` fields that the request gives, but for ``max_tokens``.
        max_tokens: None takes the server's default.
        limit_field: what the dialect calls ``max_tokens``.
        may_refuse_limit: whether ``--strict-max-tokens`` holds; else a limit is always lowered.
        input_field: what it calls the messages.
        truncate_prompt_tokens: only the last tokens of the prompt are kept; -1 is what fits.
    """

    model: str | None
    chat: ChatInput
    origin: Origin
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    limit_field: str = "max_tokens"
    may_refuse_limit: bool = True
    input_field: str = "messages"
    structured: StructuredOutputs | None = None
    truncate_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A query that was checked and encoded: all that can be a client's mistake is behind it.

    Attributes:
        model: the name to echo.
        request: what every choice submits, but for its id and its seed.
    """

    model: str
    prompt: ChatPrompt
    request: EngineRequest

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling


def encode_query(server: Server, query: ChatQuery, caller: Caller) -> tuple[str, ChatPrompt]:
    """The model's name to echo, and the prompt of any length.

    Raises:
        BadRequest: the model is unknown, or the chat cannot be rendered.
    """
    model = server.resolve_model(query.model)
    chat = query.chat
    if chat.thinking is None and chat.reasoning_effort != "none":
        chat = replace(chat, thinking=_alias_thinking(server, model))
    return model, server.encoder.encode(chat, tenant=query.origin.salt(caller))


def _alias_thinking(server: Server, name: str) -> bool | None:
    """The mode that an alias such as ``deepseek-chat`` stands for (serving-api 4)."""
    aliases = {alias.partition("=")[0] for alias in server.config.model_alias}
    if name in aliases and name.endswith(("-chat", "-reasoner")):
        return name.endswith("-reasoner")
    return None


def prepare_chat(server: Server, query: ChatQuery, caller: Caller) -> ChatCall:
    """Check and encode a query.

    Raises:
        BadRequest: it cannot be served as it stands.
    """
    config = server.config.chat
    model, prompt = encode_query(server, query, caller)
    if query.truncate_prompt_tokens is not None:
        kept = kept_tokens(server, query.truncate_prompt_tokens, query.max_tokens)
        prompt = replace(prompt, token_ids=prompt.token_ids[-kept:])
    server.check_prompt(len(prompt.token_ids), param=query.input_field)
    max_tokens = output_limit(
        server,
        len(prompt.token_ids),
        query.max_tokens,
        default=default_chat_limit(prompt, config, server.model.max_model_len),
        is_strict=config.strict_max_tokens and query.may_refuse_limit,
        param=query.limit_field,
    )
    profile = server.encoder.profile
    is_v4 = not profile.has_system_marker
    given = thinking_policy(query.sampling, prompt, config, is_v4=is_v4)
    given["structured_outputs"] = query.structured
    sampling = sampling_params(server, given, max_tokens=max_tokens)
    tokenizer = server.tokenizer
    request = query.origin.engine_request(
        caller,
        prompt.token_ids,
        sampling,
        constraint=grammar.chat_constraint(
            prompt,
            tokenizer,
            query.structured,
            strict_level=config.tool_strict_level,
            tags=profile.tags,
        ),
        bad_token_ids=grammar.bad_token_ids(sampling.bad_words, tokenizer),
        thinking_budget=grammar.thinking_budget(sampling, prompt, tokenizer),
    )
    return ChatCall(model, prompt, request)
