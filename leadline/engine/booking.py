"""What a step's result does to its request, and what is told of it. No torch."""

from __future__ import annotations

from leadline.core.request import FinishReason, Request, TokenLogprobs, TokenOutput
from leadline.engine.plan import GroupResult, RowGroup, RowKind


def book(group: RowGroup, result: GroupResult, eos_token_id: int) -> TokenOutput | None:
    """Append sampled tokens up to the one that ends the request, and collect prompt logprobs.

    Returns:
        What is new about the request, with its reason where it has ended; None where nothing is.
    """
    request = group.request
    if result.error is not None:
        return output_of(request, FinishReason.ERROR, error=result.error)
    is_fed = group.kind is RowKind.PREFILL and group.end == request.prefill_end
    scores = _take_scores(request, result, is_fed)
    if not result.token_ids:
        if not is_fed or request.sampling.max_tokens:
            return None
        return output_of(request, FinishReason.LENGTH, prompt_logprobs=scores)
    request.in_flight -= 1
    number, reason, stop_token_id = 0, None, None
    while reason is None and number < len(result.token_ids):
        request.append(result.token_ids[number])
        number += 1
        if request.constraint is not None and request.constraint.error is not None:
            error = f"request {request.request_id}: its grammar failed: {request.constraint.error}"
            return output_of(request, FinishReason.ERROR, error=error)
        reason, stop_token_id = ending(request, eos_token_id)
    return output_of(
        request,
        reason,
        token_ids=result.token_ids[:number],
        logprobs=result.logprobs[:number],
        prompt_logprobs=scores,
        stop_token_id=stop_token_id,
    )


def output_of(request: Request, reason: FinishReason | None, **said: object) -> TokenOutput:
    """An output with what every output of the request says."""
    return TokenOutput(
        request.request_id,
        finish_reason=reason,
        num_cached_tokens=request.num_cached_tokens,
        num_replayed_tokens=request.num_replayed_tokens,
        queue_seconds=request.queue_seconds,
        **said,  # type: ignore[arg-type]
    )


def ending(request: Request, eos_token_id: int) -> tuple[FinishReason | None, int | None]:
    """Whether the newest token ends its request, and by which of its ``stop_token_ids``.

    Below ``min_tokens`` no token stops it (serving-api 9.1), but a grammar after which nothing
    may follow does, with ``ignore_eos`` too (9.4). ``max_tokens`` was lowered at arrival to what
    ``max_model_len`` leaves, so that length needs no second rule.
    """
    sampling, newest = request.sampling, request.tokens[-1]
    if request.num_output_tokens >= sampling.min_tokens:
        if newest == eos_token_id and not sampling.ignore_eos:
            return FinishReason.STOP, None
        if newest in sampling.stop_token_ids:
            return FinishReason.STOP, newest
    if request.constraint is not None and request.constraint.is_complete:
        return FinishReason.STOP, None
    if request.num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH, None
    return None, None


def _take_scores(
    request: Request, result: GroupResult, is_last: bool
) -> tuple[TokenLogprobs | None, ...]:
    """Collect a prompt's logprobs; all of them, once, when the last have come."""
    if request.prompt_logprobs is None:
        return ()
    request.prompt_logprobs += result.prompt_logprobs
    if not is_last:
        return ()
    scores, request.prompt_logprobs = tuple(request.prompt_logprobs), None
    return scores
