"""From logits to tokens: what each request asks for, gathered into rows for the sampling ops.

The same seed gives the same tokens: a draw is keyed by the request's seed and the position of the
new token, whatever runs beside it, after a preemption too (serving-api 9.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leadline.core.request import Request, SamplingParams, TokenLogprobs
from leadline.engine.constraint import TokenMasks
from leadline.engine.logprobs import launch_logprobs
from leadline.kernels import ops
from leadline.kernels.transfer import Download, upload


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


class Draw:
    """Tokens that were drawn on the device, and are on their way to the host.

    Attributes:
        token_ids: ``[v]`` int64 on the device; -1 where there is none.
    """

    def __init__(self, token_ids: Tensor, finish: Callable[[], list[SampledToken]]) -> None:
        self.token_ids = token_ids
        self._finish = finish

    @staticmethod
    def known(tokens: list[SampledToken], device: torch.device) -> Draw:
        """Of tokens that the host has chosen."""
        return Draw(upload([token.token_id for token in tokens], device), lambda: tokens)

    def tokens(self) -> list[SampledToken]:
        """One ``SampledToken`` per row, once they have come."""
        return self._finish()


class Sampler:
    """Draws the next token of every row; keeps no state between steps.

    Args:
        eos_token_id: the model's end token, held back while ``min_tokens`` is not reached.
    """

    def __init__(self, eos_token_id: int) -> None:
        self._eos_token_id = eos_token_id
        self._masks = TokenMasks()

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """``launch``, then wait for one ``SampledToken`` per row."""
        return self.launch(logits, requests).tokens()

    def launch(self, logits: Tensor, requests: Sequence[Request]) -> Draw:
        """Sample one token per row, without waiting for the device.

        Args:
            logits: ``[v, vocab_size]`` float32 or float64, row i belongs to ``requests[i]``.
                Read only.
            requests: live requests; draws are keyed by their ``seed`` and ``len(tokens)``.
        """
        adjusted = [row for row, request in enumerate(requests) if _adjusts_logits(request)]
        tokens = _draw(logits, requests, beside=adjusted)
        # What is drawn of a row as it is tells whether its logits are finite.
        raw_numbers = numbers = Download(tokens)
        if adjusted:
            own = [requests[row] for row in adjusted]
            rows = upload(adjusted, logits.device)
            raw = logits.index_select(0, rows)
            tokens = tokens.index_copy(0, rows, _draw(self._adjust(raw, own), own))
            numbers = Download(tokens)
        logprobs = _launch_logprobs(logits, tokens, requests)
        errors = [r.constraint.error if r.constraint is not None else None for r in requests]

        def finish() -> list[SampledToken]:
            found = zip(numbers.wait().tolist(), raw_numbers.wait().tolist(), errors, strict=True)
            entries = logprobs()
            return [
                SampledToken(token, entries.get(row)) if token >= 0 else _failure(raw >= 0, error)
                for row, (token, raw, error) in enumerate(found)
            ]

        return Draw(tokens, finish)

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
        device = logits.device
        ops.apply_bitmask(logits, upload(rows, device), upload(masks, device, torch.int32))

    def _hold_back(self, row: Tensor, request: Request) -> None:
        """Below ``min_tokens``, no end: unless nothing else is allowed (serving-api 9.1)."""
        params = request.sampling
        if request.num_output_tokens >= params.min_tokens:
            return
        # With ignore_eos the end token is an ordinary one.
        ending = () if params.ignore_eos else (self._eos_token_id,)
        held = upload([*params.stop_token_ids, *ending], row.device)
        ends = row.index_select(0, held)
        row.index_fill_(0, held, -torch.inf)
        row.index_copy_(0, held, torch.where(row.max() == -torch.inf, ends, -torch.inf))


def _failure(is_sound: bool, grammar_error: str | None) -> SampledToken:
    """Why a row has no token."""
    if not is_sound:
        return SampledToken(-1, error="its logits are not finite", is_corrupted=True)
    if grammar_error:
        return SampledToken(-1, error=f"its grammar failed: {grammar_error}")
    return SampledToken(-1, error="nothing is allowed")


def _bias_and_mask(row: Tensor, request: Request) -> None:
    params = request.sampling
    if params.logit_bias:
        biased = upload(list(params.logit_bias), row.device)
        row.index_add_(0, biased, upload(list(params.logit_bias.values()), row.device, row.dtype))
    if params.allowed_token_ids is not None:
        allowed = upload(params.allowed_token_ids, row.device)
        kept = row.index_select(0, allowed)
        row.fill_(-torch.inf)
        row.index_copy_(0, allowed, kept)
    bad = [ids[-1] for ids in request.bad_token_ids if _is_near(request, ids)]
    if bad:
        row.index_fill_(0, upload(bad, row.device), -torch.inf)


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
        values = [getattr(request.sampling, name) for request in requests]
        return upload(values, logits.device, logits.dtype)

    ops.apply_penalties(
        logits,
        *upload(np.concatenate(said, axis=1), logits.device),
        presence_R=column("presence_penalty"),
        frequency_R=column("frequency_penalty"),
        repetition_R=column("repetition_penalty"),
    )


def _draw(logits: Tensor, requests: Sequence[Request], beside: Sequence[int] = ()) -> Tensor:
    """Greedy rows take the best id, the others draw; but those of rows ``beside`` do not count."""
    others = set(beside)
    drawn = [i for i, r in enumerate(requests) if not r.sampling.is_greedy and i not in others]
    if drawn and len(drawn) == len(requests):
        return _sample(logits, requests)
    tokens = ops.greedy(logits)
    if drawn:
        rows = upload(drawn, logits.device)
        sampled = _sample(logits.index_select(0, rows), [requests[i] for i in drawn])
        tokens = tokens.index_copy(0, rows, sampled)
    return tokens


def _sample(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """``[v]`` int64: a draw of every row."""
    # In one copy: float64 holds top_k as it is.
    columns = list(zip(*map(_draw_parameters, requests), strict=True))
    temperature, min_p, top_k, top_p, uniform = upload(columns, logits.device, torch.float64)
    return ops.sample(
        logits,
        temperature_R=temperature,
        min_p_R=min_p,
        top_k_R=top_k.long(),
        top_p_R=top_p,
        uniform_R=uniform,
    )


def _draw_parameters(request: Request) -> tuple[float, ...]:
    """Temperature, min_p, top_k, top_p, and the uniform number of the next token."""
    params = request.sampling
    uniform = ops.counter_uniform(request.seed, len(request.tokens))
    return params.temperature, params.min_p, params.top_k, params.top_p, uniform


def _launch_logprobs(
    logits: Tensor, tokens: Tensor, requests: Sequence[Request]
) -> Callable[[], dict[int, TokenLogprobs]]:
    """Log-probabilities by row, of the rows that asked (serving-api 9.3)."""
    counts = {
        row: request.sampling.logprobs
        for row, request in enumerate(requests)
        if request.sampling.logprobs is not None
    }
    if not counts:
        return dict
    rows = upload(list(counts), logits.device)
    # Rows without a token have the numbers of some token, which nobody reads.
    chosen = tokens.index_select(0, rows).clamp(min=0)
    asked = logits if len(counts) == len(requests) else logits.index_select(0, rows)
    finish = launch_logprobs(asked, chosen, list(counts.values()))
    return lambda: dict(zip(counts, finish(), strict=True))
