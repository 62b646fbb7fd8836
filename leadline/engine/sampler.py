"""From logits to tokens: what each request asks for, gathered into rows for the sampling ops.

The same seed gives the same tokens: a draw is keyed by the request's seed and the position of the
new token, whatever runs beside it, after a preemption too (serving-api 9.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leadline.core.request import Request, SamplingParams, TokenLogprobs
from leadline.kernels import ops


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One row's result.

    Attributes:
        token_id: the new token; -1 says that the row has no valid distribution (NaN logits, or
            nothing that the request allows).
        logprobs: of the model's own logits; None unless asked for.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Draws the next token of every row; keeps no state between steps.

    Args:
        eos_token_id: the model's end token, held back while ``min_tokens`` is not reached.
    """

    def __init__(self, eos_token_id: int) -> None:
        self._eos_token_id = eos_token_id

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """Sample one token per row.

        Args:
            logits: ``[v, vocab_size]`` float32 or float64, row i belongs to ``requests[i]``.
                Read only.
            requests: live requests; draws are keyed by their ``seed`` and ``len(tokens)``.

        Returns:
            One ``SampledToken`` per row.
        """
        if all(_is_plain_greedy(request.sampling) for request in requests):
            return [SampledToken(token) for token in ops.greedy(logits).tolist()]
        tokens = _draw(self._adjust(logits, requests), requests)
        logprobs = _logprobs(logits, tokens, requests)
        return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(tokens)]

    def _adjust(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """Bias, masks and penalties, in this order, on a copy when any row wants one."""
        if not any(_adjusts_logits(request) for request in requests):
            return logits
        logits = logits.clone()
        for row, request in enumerate(requests):
            self._bias_and_mask(logits[row], request)
        penalised = [i for i, request in enumerate(requests) if _has_penalties(request.sampling)]
        if penalised:
            logits[penalised] = _penalise(logits[penalised], [requests[i] for i in penalised])
        return logits

    def _bias_and_mask(self, row: Tensor, request: Request) -> None:
        params = request.sampling
        if params.logit_bias:
            row[list(params.logit_bias)] += row.new_tensor(list(params.logit_bias.values()))
        if params.allowed_token_ids is not None:
            allowed = list(params.allowed_token_ids)
            kept = row[allowed]
            row.fill_(-torch.inf)
            row[allowed] = kept
        if request.num_output_tokens < params.min_tokens:
            # With ignore_eos the end token is an ordinary one.
            ending = () if params.ignore_eos else (self._eos_token_id,)
            row[[*params.stop_token_ids, *ending]] = -torch.inf


def _is_plain_greedy(params: SamplingParams) -> bool:
    """Whether a row needs its best id and nothing else: the hot path of greedy decoding."""
    return (
        params.temperature < 1e-5
        and params.logprobs is None
        and not params.min_tokens
        and not params.logit_bias
        and params.allowed_token_ids is None
        and not _has_penalties(params)
    )


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )


def _adjusts_logits(request: Request) -> bool:
    params = request.sampling
    return (
        bool(params.logit_bias)
        or params.allowed_token_ids is not None
        or request.num_output_tokens < params.min_tokens
        or _has_penalties(params)
    )


def _penalise(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    counts = np.zeros(logits.shape, dtype=np.int64)
    seen = np.zeros(logits.shape, dtype=np.bool_)
    for row, request in enumerate(requests):
        tokens = np.array(request.tokens)
        seen[row, tokens] = True
        np.add.at(counts[row], tokens[request.num_prompt_tokens :], 1)

    def column(name: str) -> Tensor:
        return logits.new_tensor([getattr(request.sampling, name) for request in requests])

    return ops.apply_penalties(
        logits,
        torch.from_numpy(counts).to(logits.device),
        torch.from_numpy(seen).to(logits.device),
        presence_R=column("presence_penalty"),
        frequency_R=column("frequency_penalty"),
        repetition_R=column("repetition_penalty"),
    )


def _draw(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """Greedy rows take the best id, the others draw."""
    tokens = ops.greedy(logits).tolist()
    drawn = [i for i, request in enumerate(requests) if not request.sampling.is_greedy]
    if not drawn:
        return tokens

    params = [requests[i].sampling for i in drawn]
    uniforms = [ops.counter_uniform(requests[i].seed, len(requests[i].tokens)) for i in drawn]

    def column(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    sampled = ops.sample(
        logits[drawn],
        temperature_R=column([p.temperature for p in params]),
        min_p_R=column([p.min_p for p in params]),
        top_k_R=column([p.top_k for p in params], torch.int64),
        top_p_R=column([p.top_p for p in params]),
        uniform_R=column(uniforms),
    )
    for row, token in zip(drawn, sampled.tolist(), strict=True):
        tokens[row] = token
    return tokens


def _logprobs(
    logits: Tensor, tokens: Sequence[int], requests: Sequence[Request]
) -> dict[int, TokenLogprobs]:
    """Log-probabilities by row, of the rows that asked and have a token (serving-api 9.3)."""
    found = {}
    for row, (token, request) in enumerate(zip(tokens, requests, strict=True)):
        wanted = request.sampling.logprobs
        if wanted is None or token < 0:
            continue
        values = logits[row].double().log_softmax(-1)
        chosen = values[token]
        # Of equal values the smaller id ranks first, as greedy picks it.
        rank = 1 + int((values > chosen).sum()) + int((values[:token] == chosen).sum())
        count = len(values) if wanted < 0 else min(wanted, len(values))
        top, ids = values.topk(count)
        pairs = tuple(zip(ids.tolist(), top.tolist(), strict=True))
        found[row] = TokenLogprobs(token, chosen.item(), rank, pairs)
    return found
