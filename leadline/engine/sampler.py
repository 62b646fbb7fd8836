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
from leadline.engine.constraint import TokenMasks
from leadline.engine.logprobs import token_logprobs
from leadline.kernels import ops


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One row's result.

    Attributes:
        token_id: the new token; -1 where there is an error.
        logprobs: of the model's own logits; None unless asked for.
        error: why no token can be drawn: its logits are not finite, nothing is allowed, or its
            grammar's engine gave up.
        is_corrupted: the logits are not finite.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    is_corrupted: bool = False


class Sampler:
    """Draws the next token of every row; keeps no state between steps.

    Args:
        eos_token_id: the model's end token, held back while ``min_tokens`` is not reached.
    """

    def __init__(self, eos_token_id: int) -> None:
        self._eos_token_id = eos_token_id
        self._masks = TokenMasks()

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """Sample one token per row.

        Args:
            logits: ``[v, vocab_size]`` float32 or float64, row i belongs to ``requests[i]``.
                Read only.
            requests: live requests; draws are keyed by their ``seed`` and ``len(tokens)``.

        Returns:
            One ``SampledToken`` per row.
        """
        adjusted = [row for row, request in enumerate(requests) if _adjusts_logits(request)]
        tokens = _draw(logits, requests, beside=adjusted)
        if adjusted:
            own = [requests[row] for row in adjusted]
            drawn = _draw(self._adjust(logits[adjusted], own), own)
            for row, token in zip(adjusted, drawn, strict=True):
                tokens[row] = token
        logprobs = _logprobs(logits, tokens, requests)
        return [
            SampledToken(token, logprobs.get(row)) if token >= 0 else _failure(logits[row], request)
            for row, (token, request) in enumerate(zip(tokens, requests, strict=True))
        ]

    def _adjust(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """Bias and masks, grammars, penalties: in this order, in place (serving-api 9.1)."""
        for row, request in zip(logits, requests, strict=True):
            _bias_and_mask(row, request)
        self._mask_by_grammars(logits, requests)
        for row, request in zip(logits, requests, strict=True):
            self._hold_back(row, request)
        _penalise(logits, requests)
        for row, request in zip(logits, requests, strict=True):
            if _is_thinking_over(request):
                _force(row, request)
        return logits

    def _mask_by_grammars(self, logits: Tensor, requests: Sequence[Request]) -> None:
        """Leave what grammars allow; nothing of a row whose grammar's engine gives up."""
        rows, matchers = [], []
        for row, request in enumerate(requests):
            if request.constraint is not None and request.constraint.matcher is not None:
                rows.append(row)
                matchers.append(request.constraint.matcher)
        if not rows:
            return
        masks = self._masks.fill(matchers, logits.shape[1])
        for matcher, mask in zip(matchers, masks, strict=True):
            if matcher.is_error():
                mask[:] = 0
        ops.apply_bitmask(
            logits,
            torch.tensor(rows, device=logits.device),
            torch.from_numpy(masks).to(logits.device),
        )

    def _hold_back(self, row: Tensor, request: Request) -> None:
        """Below ``min_tokens``, no end: unless nothing else is allowed (serving-api 9.1)."""
        params = request.sampling
        if request.num_output_tokens >= params.min_tokens:
            return
        # With ignore_eos the end token is an ordinary one.
        ending = () if params.ignore_eos else (self._eos_token_id,)
        held = [*params.stop_token_ids, *ending]
        ends = row[held]
        row[held] = -torch.inf
        row[held] = torch.where(row.max() == -torch.inf, ends, row[held])


def _failure(row: Tensor, request: Request) -> SampledToken:
    """Why a row has no token."""
    if not bool(row.max().isfinite()):  # of NaN among others, that is NaN
        return SampledToken(-1, error="its logits are not finite", is_corrupted=True)
    if request.constraint is not None and request.constraint.error:
        return SampledToken(-1, error=f"its grammar failed: {request.constraint.error}")
    return SampledToken(-1, error="nothing is allowed")


def _bias_and_mask(row: Tensor, request: Request) -> None:
    params = request.sampling
    if params.logit_bias:
        row[list(params.logit_bias)] += row.new_tensor(list(params.logit_bias.values()))
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        kept = row[allowed]
        row.fill_(-torch.inf)
        row[allowed] = kept
    bad = [ids[-1] for ids in request.bad_token_ids if _is_near(request, ids)]
    if bad:
        row[bad] = -torch.inf


def _is_near(request: Request, bad_ids: Sequence[int]) -> bool:
    """Whether the output ends with all of a bad sequence but its last id."""
    num_before = len(bad_ids) - 1
    if num_before > request.num_output_tokens:
        return False
    return tuple(request.tokens[len(request.tokens) - num_before :]) == tuple(bad_ids[:-1])


def _is_thinking_over(request: Request) -> bool:
    """Whether the end of reasoning is due; a grammar that holds already tells that it is over."""
    budget, constraint = request.thinking_budget, request.constraint
    return (
        budget is not None
        and request.num_output_tokens >= budget.num_tokens
        and (constraint is None or constraint.matcher is None)
    )


def _force(row: Tensor, request: Request) -> None:
    """Leave the end of reasoning only, whatever else forbids it; NaN rows stay what they are."""
    assert request.thinking_budget is not None
    is_finite = ~row.isnan().any()
    row.fill_(-torch.inf)
    row[request.thinking_budget.end_id] = torch.where(is_finite, 0.0, torch.nan)


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )


def _adjusts_logits(request: Request) -> bool:
    params, constraint = request.sampling, request.constraint
    return (
        bool(params.logit_bias)
        or params.allowed_token_ids is not None
        or bool(request.bad_token_ids)
        or (constraint is not None and constraint.matcher is not None)
        or request.num_output_tokens < params.min_tokens
        or _has_penalties(params)
        or _is_thinking_over(request)
    )


def _penalise(logits: Tensor, requests: Sequence[Request]) -> None:
    said = []
    for row, request in enumerate(requests):
        if not _has_penalties(request.sampling):
            continue
        tokens = np.array(request.tokens)
        (ids,) = np.bincount(tokens).nonzero()
        counts = np.bincount(tokens[request.num_prompt_tokens :], minlength=logits.shape[1])[ids]
        said.append(np.stack([np.full_like(ids, row), ids, counts]))
    if not said:
        return

    def column(name: str) -> Tensor:
        return logits.new_tensor([getattr(request.sampling, name) for request in requests])

    ops.apply_penalties(
        logits,
        *torch.from_numpy(np.concatenate(said, axis=1)).to(logits.device),
        presence_R=column("presence_penalty"),
        frequency_R=column("frequency_penalty"),
        repetition_R=column("repetition_penalty"),
    )


def _draw(logits: Tensor, requests: Sequence[Request], beside: Sequence[int] = ()) -> list[int]:
    """Greedy rows take the best id, the others draw; but those of rows ``beside`` do not count."""
    others = set(beside)
    drawn = [i for i, r in enumerate(requests) if not r.sampling.is_greedy and i not in others]
    if drawn and len(drawn) == len(requests):
        return _sample(logits, requests).tolist()
    tokens = ops.greedy(logits)
    if drawn:
        tokens[drawn] = _sample(logits[drawn], [requests[i] for i in drawn])
    return tokens.tolist()


def _sample(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """``[v]`` int64: a draw of every row."""
    params = [request.sampling for request in requests]

    def column(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    return ops.sample(
        logits,
        temperature_R=column([p.temperature for p in params]),
        min_p_R=column([p.min_p for p in params]),
        top_k_R=column([p.top_k for p in params], torch.int64),
        top_p_R=column([p.top_p for p in params]),
        uniform_R=column([ops.counter_uniform(r.seed, len(r.tokens)) for r in requests]),
    )


def _logprobs(
    logits: Tensor, tokens: Sequence[int], requests: Sequence[Request]
) -> dict[int, TokenLogprobs]:
    """Log-probabilities by row, of the rows that asked and have a token (serving-api 9.3)."""
    counts = {
        row: request.sampling.logprobs
        for row, (token, request) in enumerate(zip(tokens, requests, strict=True))
        if request.sampling.logprobs is not None and token >= 0
    }
    if not counts:
        return {}
    rows = list(counts)
    asked = logits if len(rows) == len(requests) else logits[rows]
    entries = token_logprobs(asked, [tokens[row] for row in rows], list(counts.values()))
    return dict(zip(rows, entries, strict=True))
