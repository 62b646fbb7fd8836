"""What the engine counts, as Prometheus families (serving-api 14)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from leadline.core.client import EngineStats

# The engine's counter, which is the metric's name too: help. The first table is vLLM's names.
_SHARED_COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "generation_tokens": "Tokens generated.",
    "prompt_tokens_cached": "Prompt tokens that usage shows as cached.",
    "prefix_cache_queries": "Prompt tokens looked up at first admissions.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache, of those looked up.",
    "num_preemptions": "Running requests put back into the queue for want of memory.",
    "corrupted_requests": "Requests whose logits were not finite.",
}
_OWN_COUNTERS = {
    "computed_tokens": "Prompt rows fed that no cache held.",
    "replayed_tokens": "Cached prompt rows fed again to rebuild windows.",
    "upper_rows": "Rows that ran the layers above the cut.",
    "evicted_pages": "Cached pages given to other tokens.",
    "oom_steps": "Steps that GPU memory did not suffice for; they were planned again, smaller.",
}

# Names on dashboards for what does not exist here: each stays 0.
_IDLE_COUNTERS = {
    "external_prefix_cache_queries": "Prompt tokens looked up in remote caches.",
    "external_prefix_cache_hits": "Prompt tokens found there.",
    "mm_cache_queries": "Images looked up among encoded ones.",
    "mm_cache_hits": "Images found among encoded ones.",
    "spec_decode_num_drafts": "Drafts verified.",
    "spec_decode_num_draft_tokens": "Tokens drafted.",
    "spec_decode_num_accepted_tokens": "Drafted tokens accepted.",
}

_Sample = tuple[Mapping[str, str], float]


class EngineTotals:
    """Counts that go on where a restarted engine begins again: counters never go down."""

    def __init__(self) -> None:
        self._last: dict[Any, float] = {}
        self._before: dict[Any, float] = {}

    def update(self, stats: EngineStats) -> EngineStats:
        """``stats`` with the counts of all engines so far."""
        return replace(
            stats,
            counters={name: int(self._total(name, n)) for name, n in stats.counters.items()},
            step_seconds={
                part: self._total(("part", part), seconds)
                for part, seconds in stats.step_seconds.items()
            },
            iteration_tokens=[
                (bound, int(self._total(("bound", bound), count)))
                for bound, count in stats.iteration_tokens
            ],
        )

    def _total(self, key: object, value: float) -> float:
        last = self._last.get(key, 0)
        if value < last:
            self._before[key] = self._before.get(key, 0) + last
        self._last[key] = value
        return self._before.get(key, 0) + value


def engine_families(stats: EngineStats, prefix: str, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Gauges, counters and the histogram of one engine.

    Args:
        stats: with counters that never went down.
        prefix: of the names that vLLM has too.
        labels: of every sample.
    """
    yield from _gauges(stats, prefix, labels)
    yield from _counters(stats, prefix, labels)
    if stats.iteration_tokens:
        histogram = HistogramMetricFamily(
            f"{prefix}iteration_tokens_total", "Rows fed by a step.", labels=list(labels)
        )
        buckets = [
            ("+Inf" if bound == float("inf") else str(float(bound)), float(count))
            for bound, count in stats.iteration_tokens
        ]
        histogram.add_metric(list(labels.values()), buckets, stats.counters["step_rows"])
        yield histogram


def _gauges(stats: EngineStats, prefix: str, labels: Mapping[str, str]) -> Iterator[Metric]:
    held = stats.num_pages - stats.num_free_pages
    hot = stats.num_hot_slots
    cache = {"block_size": str(stats.page_size), "num_gpu_blocks": str(stats.num_pages)}
    lora = {"running_lora_adapters": "", "waiting_lora_adapters": "", "max_lora": "0"}
    table: dict[str, tuple[str, Sequence[_Sample]]] = {
        f"{prefix}num_requests_running": (
            "Requests in prefill or decode.",
            [({}, stats.num_running)],
        ),
        f"{prefix}num_requests_waiting": ("Requests in the queue.", [({}, stats.num_waiting)]),
        f"{prefix}num_requests_waiting_by_reason": (
            "Requests in the queue: for memory and slots, or for their grammar.",
            [
                ({"reason": "capacity"}, stats.num_waiting - stats.num_deferred),
                ({"reason": "deferred"}, stats.num_deferred),
            ],
        ),
        f"{prefix}kv_cache_usage_perc": (
            "Share of pages held by requests, 0 to 1.",
            [({}, held / max(stats.num_pages, 1))],
        ),
        f"{prefix}engine_sleep_state": (
            "Always awake.",
            [
                ({"sleep_state": state}, float(state == "awake"))
                for state in ("awake", "weights_offloaded", "discard_all")
            ],
        ),
        f"{prefix}cache_config_info": ("Cache configuration, in labels.", [(cache, 1)]),
        f"{prefix}lora_requests_info": ("Always 1: there are no adapters.", [(lora, 1)]),
        "leadline:kv_pages": (
            "Cache pages: held by requests, free with a cached prefix, free.",
            [
                ({"state": "used"}, held),
                ({"state": "cached"}, stats.num_cached_pages),
                ({"state": "free"}, stats.num_free_pages - stats.num_cached_pages),
            ],
        ),
        "leadline:slots": (
            "Slots: of running requests, kept for a session's next turn, free.",
            [
                ({"state": "used"}, stats.num_slots - stats.num_free_slots),
                ({"state": "hot"}, hot),
                ({"state": "free"}, stats.num_free_slots - hot),
            ],
        ),
        "leadline:queued_tokens": (
            "Prompt tokens that no step has fed yet.",
            [({}, stats.num_queued_tokens)],
        ),
    }
    for name, (text, samples) in table.items():
        yield _family(GaugeMetricFamily, name, text, labels, samples)


def _counters(stats: EngineStats, prefix: str, labels: Mapping[str, str]) -> Iterator[Metric]:
    counts = stats.counters
    for start, table in ((prefix, _SHARED_COUNTERS), ("leadline:", _OWN_COUNTERS)):
        for name, text in table.items():
            yield _family(CounterMetricFamily, start + name, text, labels, [({}, counts[name])])
    for name, text in _IDLE_COUNTERS.items():
        yield _family(CounterMetricFamily, prefix + name, text, labels, [({}, 0)])
    yield _family(
        CounterMetricFamily,
        f"{prefix}spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens accepted, by their place in the draft.",
        labels,
        [({"position": "0"}, 0)],
    )
    yield _family(
        CounterMetricFamily,
        "leadline:steps",
        "Steps by the rows that they fed, and by what ran them.",
        labels,
        [
            ({"kind": kind, "graph": "none"}, counts[f"{kind}_steps"])
            for kind in ("prefill", "decode", "mixed")
        ],
    )
    if stats.step_seconds:
        yield _family(
            CounterMetricFamily,
            "leadline:step_seconds",
            "Host seconds spent in each part of a step.",
            labels,
            [({"part": part}, seconds) for part, seconds in stats.step_seconds.items()],
        )


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    labels: Mapping[str, str],
    samples: Sequence[_Sample],
) -> Metric:
    family = kind(name, text, labels=[*labels, *samples[0][0]])
    for own, value in samples:
        family.add_metric([*labels.values(), *own.values()], value)
    return family
