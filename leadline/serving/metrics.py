"""Prometheus metrics: what requests saw, counted here, and what the engine counts (serving-api 14).

The end of a request is counted here and not taken from the engine, which sees a stop string as an
abort. Names with ``vllm:`` are those that existing dashboards read; ``--metrics-prefix`` changes
that part.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from starlette.types import Scope

from leadline.core.client import EngineStats
from leadline.serving.engine_metrics import EngineTotals, engine_families
from leadline.text.output_parser import Fault

logger = logging.getLogger(__name__)

# A second line for every counter, which no dashboard reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

FINISHED_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("server_overloaded", "shutting_down", "not_ready", "rate_limit_exceeded")
PARSER_FAULTS = tuple(fault.value for fault in Fault)

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_GAPS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10)
_TOKENS = tuple(4**i for i in range(11))
_CHOICES = (1, 2, 5, 10, 20, 128)

# So much without one hit is no accident: something in the prompts' heads changes every time.
_SUSPICIOUS_REQUESTS, _SUSPICIOUS_TOKENS = 1000, 10**6


class ServingMetrics:
    """Counters and histograms of one API process.

    Args:
        model_name: the label that every sample carries.
        prefix: of the names that vLLM has too.
    """

    def __init__(self, model_name: str, prefix: str = "vllm:") -> None:
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": "0"}
        self._registry = CollectorRegistry()
        self._totals = EngineTotals()
        self._num_finished = 0
        self._has_warned = False
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _SECONDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two outputs of one choice.", _GAPS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean per token after the first.", _GAPS
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", _SECONDS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to the first admission.", _SECONDS
        )
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "From the first admission to the end.", _SECONDS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds",
            "From the first admission to the first token.",
            _SECONDS,
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "From the first token to the end.", _SECONDS
        )
        self.prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self.generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a choice.", _TOKENS
        )
        self.max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens",
            "As generation tokens: choices are counted apart.",
            _TOKENS,
        )
        self.kv_computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that no cache held.", _TOKENS
        )
        self.params_n = self._histogram("request_params_n", "Parameter n.", _CHOICES)
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens", "Parameter max_tokens, after defaults.", _TOKENS
        )
        self._success = self._counter(
            f"{prefix}request_success",
            "Accepted choices, by how they ended.",
            "finished_reason",
            FINISHED_REASONS,
        )
        self._rejections = self._counter(
            f"{prefix}admission_rejections", "Requests refused for load.", "reason", REJECTIONS
        )
        self._faults = self._counter(
            "leadline:parser_faults", "What parsers met and withheld.", "kind", PARSER_FAULTS
        )
        self._http_requests = Counter(
            "http_requests",
            "HTTP requests answered.",
            ["method", "status", "handler"],
            registry=self._registry,
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "From the request's head to the end of its answer.",
            ["method", "handler"],
            buckets=_SECONDS,
            registry=self._registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            self._prefix + name,
            text,
            list(self._labels),
            buckets=buckets,
            registry=self._registry,
        )
        return histogram.labels(**self._labels)

    def _counter(self, name: str, text: str, label: str, values: tuple[str, ...]) -> Counter:
        counter = Counter(name, text, [*self._labels, label], registry=self._registry)
        for value in values:  # rates need a first sample
            counter.labels(*self._labels.values(), value)
        return counter

    def count_finished(self, reason: str) -> None:
        """Note the end of an accepted request: one of ``FINISHED_REASONS``, once (C61)."""
        self._num_finished += 1
        self._success.labels(*self._labels.values(), reason).inc()

    def count_answer(self, scope: Scope, status: int, seconds: float) -> None:
        """Note an HTTP request that was answered, and whether it was refused for load."""
        # The endpoint's name, not the path: clients can invent any number of those.
        handler = getattr(scope.get("endpoint"), "__name__", "none")
        self._http_requests.labels(scope["method"], str(status), handler).inc()
        self._http_seconds.labels(scope["method"], handler).observe(seconds)
        if (reason := scope["state"].get("failure")) in REJECTIONS:
            self._rejections.labels(*self._labels.values(), reason).inc()

    def count_faults(self, kinds: Iterable[str]) -> None:
        """Note what a parser withheld from its client: some of ``PARSER_FAULTS`` (3.6, 3.7)."""
        for kind in kinds:
            self._faults.labels(*self._labels.values(), kind).inc()

    def exposition(self, stats: EngineStats | None) -> bytes:
        """Everything in the text format; ``stats`` is None while the engine does not answer."""
        families: list[Metric] = []
        if stats is not None:
            stats = self._totals.update(stats)
            self._watch_hits(stats)
            families = list(engine_families(stats, self._prefix, self._labels))
        return generate_latest(_Scrape(self._registry, families))

    def _watch_hits(self, stats: EngineStats) -> None:
        """Warn once when pages are kept for reuse and none is ever reused (serving-api 14)."""
        queried = stats.counters["prefix_cache_queries"]
        if (
            self._has_warned
            or not stats.num_cached_pages
            or stats.counters["prefix_cache_hits"]
            or self._num_finished < _SUSPICIOUS_REQUESTS
            or queried < _SUSPICIOUS_TOKENS
        ):
            return
        self._has_warned = True
        logger.warning(
            "no prefix was found in the cache after %d requests and %d prompt tokens: the first "
            "%d tokens of every prompt differ; look for a date, an id or a salt in its head",
            self._num_finished,
            queried,
            stats.page_size,
        )


@dataclass(frozen=True, slots=True)
class _Scrape:
    """A collector of both kinds, made for one exposition."""

    registry: CollectorRegistry
    families: list[Metric]

    def collect(self) -> Iterator[Metric]:
        yield from self.registry.collect()
        yield from self.families
