"""What clients ask of sampling -> ``SamplingParams``, the same in every dialect (serving-api 9)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from leadline.core.errors import BadRequest
from leadline.core.request import SamplingParams
from leadline.serving.context import Server
from leadline.text.sampling_defaults import sampling_defaults, with_end_tokens

_ID_FIELDS = ("stop_token_ids", "allowed_token_ids", "logit_bias")
_LOGPROB_FIELDS = ("logprobs", "prompt_logprobs")


def sampling_params(server: Server, given: Mapping[str, Any], *, max_tokens: int) -> SamplingParams:
    """Checked parameters: what the client gave, then the server's defaults.

    Args:
        server: says the vocabulary, the limits and the defaults.
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
    options = server.config.chat
    params = {**sampling_defaults(options), **given, "max_tokens": max_tokens}
    return with_end_tokens(SamplingParams(**params), options)


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
