"""What is told of one engine request: its metrics, its log line and its span (serving-api 14)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from leadline.core.request import EngineRequest, TokenOutput
from leadline.serving.logs import Event
from leadline.serving.metrics import ServingMetrics

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)


class RequestRecord:
    """The times and counts of one engine request; ends in one sample of ``request_success``.

    Args:
        request: about to be submitted.
        log_id: the HTTP request's id.
        span: open, or None without tracing.
        decode: token ids -> text, where ``--enable-log-outputs`` asks for it.
    """

    def __init__(
        self,
        metrics: ServingMetrics,
        request: EngineRequest,
        log_id: str,
        *,
        span: Span | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._metrics = metrics
        self._request = request
        self._log_id = log_id
        self._span = span
        self._decode = decode
        self._output_ids: list[int] = []
        self._arrival = time.perf_counter()
        self._first = self._last = 0.0
        self._queue_seconds = 0.0
        self._num_cached = self._num_replayed = 0
        metrics.params_max_tokens.observe(request.sampling.max_tokens)

    def observe(self, output: TokenOutput) -> None:
        """Note the arrival of an output."""
        if not output.token_ids:
            return
        now = time.perf_counter()
        if self._last:
            self._metrics.inter_token_latency.observe(now - self._last)
        else:
            self._first = now
            self._queue_seconds = output.queue_seconds
            self._num_cached = output.num_cached_tokens
            self._num_replayed = output.num_replayed_tokens
            self._metrics.time_to_first_token.observe(now - self._arrival)
        self._last = now
        if self._decode is not None:
            self._output_ids += output.token_ids

    def finish(self, reason: str, num_tokens: int) -> None:
        """Note the end: ``reason`` is stop, length, abort or error."""
        total = time.perf_counter() - self._arrival
        num_prompt = len(self._request.prompt_token_ids)
        fields: dict[str, Any] = {
            "request_id": self._log_id,
            "id": self._request.request_id,
            "reason": reason,
            "prompt_tokens": num_prompt,
            "cached_tokens": self._num_cached,
            "replayed_tokens": self._num_replayed,
            "output_tokens": num_tokens,
            "total_seconds": total,
        }
        metrics = self._metrics
        metrics.count_finished(reason)
        metrics.prompt_tokens.observe(num_prompt)
        metrics.generation_tokens.observe(num_tokens)
        metrics.max_generation_tokens.observe(num_tokens)
        metrics.e2e_latency.observe(total)
        if self._first:
            first = self._first - self._arrival
            prefill = max(0.0, first - self._queue_seconds)
            fields |= {"queue_seconds": self._queue_seconds, "first_token_seconds": first}
            metrics.queue_time.observe(self._queue_seconds)
            metrics.prefill_time.observe(prefill)
            metrics.decode_time.observe(total - first)
            metrics.inference_time.observe(prefill + total - first)
            metrics.kv_computed_tokens.observe(num_prompt - self._num_cached)
            if num_tokens > 1:
                mean = (self._last - self._first) / (num_tokens - 1)
                metrics.time_per_output_token.observe(mean)
        logger.info(Event("finished", fields))
        if self._decode is not None:
            logger.info(
                Event(
                    "answer",
                    {"id": self._request.request_id, "text": self._decode(self._output_ids)},
                )
            )
        if self._span is not None:
            self._close(self._span, fields)

    def _close(self, span: Span, fields: dict[str, Any]) -> None:
        attributes = {
            "gen_ai.usage.completion_tokens": fields["output_tokens"],
            "gen_ai.usage.cached_tokens": fields["cached_tokens"],
            "gen_ai.response.finish_reasons": [fields["reason"]],
            "gen_ai.latency.e2e": fields["total_seconds"],
        }
        if self._first:
            attributes |= {
                "gen_ai.latency.time_in_queue": fields["queue_seconds"],
                "gen_ai.latency.time_to_first_token": fields["first_token_seconds"],
                "gen_ai.latency.time_in_model_prefill": fields["first_token_seconds"]
                - fields["queue_seconds"],
                "gen_ai.latency.time_in_model_decode": fields["total_seconds"]
                - fields["first_token_seconds"],
            }
        span.set_attributes(attributes)
        span.end()
