"""What clients ask of sampling -> ``SamplingParams``, the same in every dialect (serving-api 9)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from leadline.config.server import ChatConfig
from leadline.core.errors import BadRequest
from leadline.core.request import SamplingParams
from leadline.serving.context import Server
from leadline.text.chat import ChatPrompt

_ID_FIELDS = ("stop_token_ids", "allowed_token_ids", "logit_bias")
_LOGPROB_FIELDS = ("logprobs", "prompt_logprobs")
# Sampling values that ``generation_config.json`` and its override may hold.
_OVERRIDABLE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_MIN_THINKING_TOP_P = 0.95  # the cloud's, with thinking


def sampling_params(server: Server, given: Mapping[str, Any], *, max_tokens: int) -> SamplingParams:
    """Checked parameters: what the client gave, then the server's defaults.

    Args:
        server: says the vocabulary, the limits and ``--override-generation-config``.
        given: ``SamplingParams`` fields of the request, without those that it left out.
        max_tokens: already resolved by ``output_limit``.

    Raises:
        BadRequest: a value outside its domain (C39), an id outside the vocabulary (76), more
            log-probabilities than ``--max-logprobs``.
    """
    for name in _ID_FIELDS:
        check_token_ids(server, given.get(name) or (), param=name)
    for name in _LOGPROB_FIELDS:
        check_num_logprobs(given.get(name), server.config.chat.max_logprobs, param=name)
    overrides = server.config.chat.override_generation_config or {}
    defaults = {name: overrides[name] for name in _OVERRIDABLE if name in overrides}
    return SamplingParams(**{**defaults, **given, "max_tokens": max_tokens})


def check_token_ids(server: Server, token_ids: Iterable[int], *, param: str) -> None:
    """Raise ``BadRequest`` for an id that the model does not have."""
    vocab_size = server.model.vocab_size
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise BadRequest(
                f"{param} has id {token_id}, outside the vocabulary of {vocab_size}", param=param
            )


def check_num_logprobs(wanted: int | None, limit: int, *, param: str) -> None:
    """Raise ``BadRequest`` when more most-likely tokens are wanted than ``--max-logprobs``."""
    if wanted is None or limit == -1 or 0 <= wanted <= limit:
        return
    raise BadRequest(
        f"{param} is {wanted}; it must lie in 0..{limit} (--max-logprobs)", param=param
    )


def thinking_policy(
    given: Mapping[str, Any], prompt: ChatPrompt, config: ChatConfig, *, is_v4: bool
) -> dict[str, Any]:
    """Sampling fields of a chat under ``--sampling-policy`` (serving-api 9.2, C40).

    ``honour`` only fills what the request leaves open; ``deepseek`` replaces, without an error,
    what the cloud does not honour.
    """
    cloud: dict[str, Any] = {}
    if prompt.thinking:
        cloud = {"temperature": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        if is_v4:
            cloud["top_p"] = _MIN_THINKING_TOP_P if prompt.tools else 1.0
        else:
            cloud["top_p"] = 1.0
            if config.sampling_policy == "deepseek":
                cloud["top_p"] = max(_MIN_THINKING_TOP_P, given.get("top_p", 1.0))
    elif not is_v4:
        cloud = {"top_p": 1.0}
    if config.sampling_policy == "deepseek":
        return {**given, **cloud}
    overrides = config.override_generation_config or {}
    defaults = {name: value for name, value in cloud.items() if name not in overrides}
    return {**defaults, **given}


def output_limit(
    server: Server,
    num_prompt_tokens: int,
    wanted: int | None,
    *,
    default: int,
    is_strict: bool,
    param: str,
) -> int:
    """The output limit: the client's or ``default``, lowered to what is left (C27).

    Raises:
        BadRequest: it is below 1, or with ``is_strict`` above what is left.
    """
    left = server.model.max_model_len - num_prompt_tokens
    if wanted is None:
        return min(default, left)
    if wanted < 1:
        raise BadRequest(f"{param} is {wanted}; it must be at least 1", param=param)
    if wanted > left and is_strict:
        raise BadRequest(
            f"{param} is {wanted}, but of this model's maximum context length of "
            f"{server.model.max_model_len} tokens the prompt's {num_prompt_tokens} leave {left}",
            param=param,
            code="context_length_exceeded",
        )
    return min(wanted, left)


def default_chat_limit(server: Server, prompt: ChatPrompt) -> int:
    """Output limit of a chat that sets none: ``--default-max-tokens`` (serving-api 5.1)."""
    overrides = server.config.chat.override_generation_config or {}
    if (limit := overrides.get("max_new_tokens")) is not None:
        return int(limit)
    choice = server.config.chat.default_max_tokens
    if choice == "deepseek":
        return prompt.default_max_tokens(server.model.max_model_len)
    return server.model.max_model_len if choice == "remaining" else int(choice)


def kept_tokens(server: Server, wanted: int, max_tokens: int | None) -> int:
    """How many of a prompt's last tokens ``truncate_prompt_tokens`` keeps.

    Raises:
        BadRequest: it is neither -1 nor from 1 to the context's length.
    """
    limit = server.model.max_model_len
    if wanted == -1:
        return max(1, limit - (max_tokens or 1))
    if not 1 <= wanted <= limit:
        raise BadRequest(
            f"truncate_prompt_tokens is {wanted}; it must be -1 or lie in 1..{limit}",
            param="truncate_prompt_tokens",
        )
    return wanted
