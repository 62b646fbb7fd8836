"""Prometheus metrics: what requests saw, counted here, and what the engine counts (serving-api 14).

The end of a request is counted here and not taken from the engine, which sees a stop string as an
abort. Names with ``vllm:`` are those that existing dashboards read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from leadline.core.client import EngineStats
from leadline.core.request import EngineRequest, TokenOutput

logger = logging.getLogger(__name__)

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_GAPS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10)
_TOKENS = tuple(4**i for i in range(11))
_CHOICES = (1, 2, 5, 10, 20, 128)

# What only Leadline counts; every other counter of the engine has a name that vLLM uses too.
_OWN_COUNTERS = ("computed_tokens", "replayed_tokens", "upper_rows", "evicted_pages")


class ServingMetrics:
    """Counters and histograms of one API process."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self._registry = CollectorRegistry()
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
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "From the first token to the end.", _SECONDS
        )
        self.prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self.generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", _TOKENS
        )
        self.params_n = self._histogram("request_params_n", "Parameter n.", _CHOICES)
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens", "Parameter max_tokens, after defaults.", _TOKENS
        )
        self.success = Counter(
            "vllm:request_success",
            "Requests ended, by reason.",
            ["model_name", "engine", "finished_reason"],
            registry=self._registry,
        )
        self.http_requests = Counter(
            "http_requests",
            "HTTP requests answered.",
            ["method", "status", "handler"],
            registry=self._registry,
        )
        self.http_seconds = Histogram(
            "http_request_duration_seconds",
            "From the request's head to the end of its answer.",
            ["method", "handler"],
            buckets=_SECONDS,
            registry=self._registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}",
            text,
            ["model_name", "engine"],
            buckets=buckets,
            registry=self._registry,
        )
        return histogram.labels(self.model_name, "0")

    def track(self, request: EngineRequest, log_id: str) -> RequestTimer:
        """Start the clock of a request that is about to be submitted."""
        self.params_max_tokens.observe(request.sampling.max_tokens)
        return RequestTimer(self, request, log_id)

    def exposition(self, stats: EngineStats | None) -> bytes:
        """Everything in the text format; ``stats`` is None while the engine does not answer."""
        families = list(_engine_families(stats, self.model_name)) if stats else []
        return generate_latest(_Scrape(self._registry, families))


class RequestTimer:
    """The times and counts of one engine request; ends in one sample of ``request_success``."""

    def __init__(self, metrics: ServingMetrics, request: EngineRequest, log_id: str) -> None:
        self._metrics = metrics
        self._request = request
        self._log_id = log_id
        self._arrival = time.perf_counter()
        self._first = self._last = 0.0
        self._num_cached = 0

    def observe(self, output: TokenOutput) -> None:
        """Note the arrival of an output."""
        if not output.token_ids:
            return
        now = time.perf_counter()
        if self._last:
            self._metrics.inter_token_latency.observe(now - self._last)
        else:
            self._first = now
            self._num_cached = output.num_cached_tokens
            self._metrics.time_to_first_token.observe(now - self._arrival)
        self._last = now

    def finish(self, reason: str, num_tokens: int) -> None:
        """Note the end: ``reason`` is stop, length, abort or error."""
        metrics, now = self._metrics, time.perf_counter()
        metrics.success.labels(metrics.model_name, "0", reason).inc()
        metrics.prompt_tokens.observe(len(self._request.prompt_token_ids))
        metrics.generation_tokens.observe(num_tokens)
        metrics.e2e_latency.observe(now - self._arrival)
        if self._first:
            metrics.decode_time.observe(now - self._first)
            if num_tokens > 1:
                mean = (self._last - self._first) / (num_tokens - 1)
                metrics.time_per_output_token.observe(mean)
        logger.info(
            "%s %s: %s, prompt %d tokens (%d cached), answer %d, first after %.3f s, all in %.3f s",
            self._log_id,
            self._request.request_id,
            reason,
            len(self._request.prompt_token_ids),
            self._num_cached,
            num_tokens,
            (self._first or now) - self._arrival,
            now - self._arrival,
        )


@dataclass(frozen=True, slots=True)
class _Scrape:
    """A collector of both kinds, made for one exposition."""

    registry: CollectorRegistry
    families: list[Metric]

    def collect(self) -> Iterator[Metric]:
        yield from self.registry.collect()
        yield from self.families


# One sample: the labels beyond model and engine, and the value.
_Sample = tuple[dict[str, str], float]


def _engine_families(stats: EngineStats, model_name: str) -> Iterator[Metric]:
    held = stats.num_pages - stats.num_free_pages
    used_slots = stats.num_slots - stats.num_free_slots
    cache = {"block_size": str(stats.page_size), "num_gpu_blocks": str(stats.num_pages)}
    gauges: dict[str, tuple[str, list[_Sample]]] = {
        "vllm:num_requests_running": ("Requests in prefill or decode.", [({}, stats.num_running)]),
        "vllm:num_requests_waiting": ("Requests in the queue.", [({}, stats.num_waiting)]),
        "vllm:kv_cache_usage_perc": (
            "Share of pages held by requests, 0 to 1.",
            [({}, held / max(stats.num_pages, 1))],
        ),
        "vllm:cache_config_info": ("Cache configuration, in labels.", [(cache, 1)]),
        "leadline:kv_pages": (
            "Cache pages by state.",
            [
                ({"state": "used"}, held),
                ({"state": "cached"}, stats.num_cached_pages),
                ({"state": "free"}, stats.num_free_pages - stats.num_cached_pages),
            ],
        ),
        "leadline:slots": (
            "Slots of running requests by state.",
            [({"state": "used"}, used_slots), ({"state": "free"}, stats.num_free_slots)],
        ),
    }
    counters: dict[str, tuple[str, list[_Sample]]] = {
        "leadline:step_seconds": (
            "Seconds spent in each part of a step.",
            [({"part": part}, value) for part, value in stats.step_seconds.items()],
        )
    }
    for name, count in stats.counters.items():
        prefix = "leadline" if name in _OWN_COUNTERS else "vllm"
        counters[f"{prefix}:{name}"] = (f"The engine's count of {name}.", [({}, count)])
    for kind, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (text, samples) in table.items():
            if not samples:  # no step has run yet
                continue
            family = kind(name, text, labels=["model_name", "engine", *samples[0][0]])
            for labels, value in samples:
                family.add_metric([model_name, "0", *labels.values()], value)
            yield family
