"""Body of a completion -> one engine request for each prompt (serving-api 6)."""

from __future__ import annotations

from leadline.core.errors import BadRequest
from leadline.core.request import Constraint, EngineRequest
from leadline.serving.context import Caller, Server
from leadline.serving.openai.schema import CompletionRequest
from leadline.serving.sampling import check_token_ids, kept_tokens, output_limit, sampling_params
from leadline.text import grammar
from leadline.text.tokenizer import FIM_BEGIN, FIM_END, FIM_HOLE

_MAX_PROMPTS = 1024
_DEFAULT_MAX_TOKENS = 16


def completion_requests(
    server: Server, body: CompletionRequest, caller: Caller
) -> list[EngineRequest]:
    """What every prompt submits, but for the ids and the seeds of its choices.

    Raises:
        BadRequest: the body cannot be served as it stands.
    """
    body.check()
    if body.best_of is not None and body.best_of > (body.n or 1):
        raise BadRequest(
            f"best_of is {body.best_of}; more choices than n ({body.n or 1}) are not ranked",
            param="best_of",
        )
    given = body.sampling()
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
        if body.echo:
            given.setdefault("prompt_logprobs", body.logprobs)
    if body.max_tokens == 0 and "prompt_logprobs" not in given:
        raise BadRequest(
            "max_tokens is 0; it must be at least 1 unless the prompt is scored by echo with "
            "logprobs, or prompt_logprobs",
            param="max_tokens",
        )
    origin = body.origin()
    content = grammar.content_constraint(body.structured_outputs)
    constraint = None if content is None else Constraint(at_once=content)
    bad_token_ids = grammar.bad_token_ids(tuple(body.bad_words or ()), server.tokenizer)
    requests = []
    for token_ids in _prompts(body, server):
        server.check_prompt(len(token_ids), param="prompt")
        limit = 0  # the prompt is only scored (C31)
        if body.max_tokens != 0:
            limit = output_limit(
                server,
                len(token_ids),
                body.max_tokens,
                default=_DEFAULT_MAX_TOKENS,
                is_strict=server.config.chat.strict_max_tokens,
                param="max_tokens",
            )
        sampling = sampling_params(server, given, max_tokens=limit)
        requests.append(
            origin.engine_request(
                caller,
                token_ids,
                sampling,
                constraint=constraint,
                bad_token_ids=bad_token_ids,
            )
        )
    return requests


def _prompts(body: CompletionRequest, server: Server) -> list[tuple[int, ...]]:
    """Ids of every prompt: a string, strings, ids, or lists of ids."""
    given = body.prompt
    if isinstance(given, str):
        prompts: list[str | list[int]] = [given]
    elif given and all(isinstance(item, int) for item in given):
        prompts = [[item for item in given if isinstance(item, int)]]
    else:
        prompts = [item for item in given if not isinstance(item, int)]
        if len(prompts) < len(given):
            raise BadRequest("prompt mixes ids with other items", param="prompt")
    if not 1 <= len(prompts) <= _MAX_PROMPTS:
        raise BadRequest(
            f"prompt holds {len(prompts)} prompts; it must be 1 to {_MAX_PROMPTS}", param="prompt"
        )
    encoded = [_prompt_ids(prompt, body, server) for prompt in prompts]
    if body.truncate_prompt_tokens is not None:
        kept = kept_tokens(server, body.truncate_prompt_tokens, body.max_tokens)
        encoded = [token_ids[-kept:] for token_ids in encoded]
    return encoded


def _prompt_ids(
    prompt: str | list[int], body: CompletionRequest, server: Server
) -> tuple[int, ...]:
    if not prompt and body.suffix is None:
        raise BadRequest("prompt is empty; it needs at least one token", param="prompt")
    if isinstance(prompt, list):
        if body.suffix is not None:
            raise BadRequest("suffix goes with a prompt of text, not of ids", param="suffix")
        check_token_ids(server, prompt, param="prompt")
        return tuple(prompt)
    tokenizer = server.tokenizer
    if body.suffix is not None:
        if not tokenizer.has_markers(FIM_BEGIN, FIM_HOLE, FIM_END):
            raise BadRequest(
                "suffix: the tokenizer has no fill-in-the-middle markers",
                param="suffix",
                code="not_supported",
            )
        prompt = f"{FIM_BEGIN}{prompt}{FIM_HOLE}{body.suffix}{FIM_END}"
    encode = tokenizer.encode if body.add_special_tokens is False else tokenizer.encode_prompt
    return tuple(encode(prompt))
