"""Metrics: every name, what moves them, and one end for each accepted request (serving-api 14)."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from leadline.config.server import TelemetryConfig
from leadline.core.client import EngineStats
from leadline.core.errors import ConfigError, EngineOverloaded, RequestTimeout
from leadline.core.request import EngineRequest, SamplingParams, TokenOutput
from leadline.engine.metrics import COUNTERS
from leadline.serving.metrics import ServingMetrics
from leadline.serving.request_record import RequestRecord
from tests.serving.conftest import HELLO, MakeRig
from tests.serving.test_admin import samples

GAUGES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:engine_sleep_state",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
    "leadline:kv_pages",
    "leadline:slots",
]
COUNTER_NAMES = [
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:prompt_tokens_cached",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits",
    "vllm:mm_cache_queries",
    "vllm:mm_cache_hits",
    "vllm:num_preemptions",
    "vllm:request_success",
    "vllm:admission_rejections",
    "vllm:corrupted_requests",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "leadline:replayed_tokens",
    "leadline:upper_rows",
    "leadline:computed_tokens",
    "leadline:evicted_pages",
    "leadline:oom_steps",
    "leadline:steps",
    "leadline:parser_faults",
    "http_requests",
]
HISTOGRAMS = [
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_n",
    "vllm:request_params_max_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_prefill_kv_computed_tokens",
    "vllm:iteration_tokens_total",
    "http_request_duration_seconds",
]
STATS = EngineStats(
    num_waiting=5,
    num_deferred=2,
    num_pages=10,
    num_free_pages=7,
    num_cached_pages=1,
    num_slots=4,
    num_free_slots=3,
    num_hot_slots=2,
    counters=dict.fromkeys(COUNTERS, 0) | {"evicted_pages": 0},
    iteration_tokens=[(1.0, 3), (64.0, 5), (math.inf, 6)],
    step_seconds={"forward": 0.5},
)


def parsed(exposition: bytes) -> dict[tuple[str, ...], float]:
    """Name and labels (but for the model's) -> value."""
    return {
        (s.name, *(v for k, v in s.labels.items() if k not in ("model_name", "engine"))): s.value
        for family in text_string_to_metric_families(exposition.decode())
        for s in family.samples
    }


def test_c61_every_name_is_there_with_its_kind(rig: MakeRig) -> None:
    server = rig("a</think>b")
    server.chat()
    server.engine.stats = lambda: _ready(STATS)  # type: ignore[method-assign]
    text = server.http.get("/metrics").text
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    wanted = (
        dict.fromkeys(GAUGES, "gauge")
        | dict.fromkeys(COUNTER_NAMES, "counter")
        | dict.fromkeys(HISTOGRAMS, "histogram")
    )
    assert kinds.items() >= wanted.items()
    for line in text.splitlines():
        if not line.startswith(("#", "http_")):
            assert 'engine="0"' in line
            assert 'model_name="tiny"' in line


async def _ready(stats: EngineStats) -> EngineStats:
    return stats


def test_c61_each_accepted_request_ends_in_one_sample(rig: MakeRig) -> None:
    server = rig("one</think>two STOP three")
    server.chat()
    server.chat(stop="STOP", n=3)
    server.chat(max_tokens=1)
    server.stream(max_tokens=1)
    server.http.post("/v1/chat/completions", json={"messages": []})  # refused: no request yet
    server.engine.refuse = EngineOverloaded("full")
    server.http.post("/v1/chat/completions", json={"messages": HELLO})  # refused by the engine
    server.engine.refuse = None
    server.engine.script = [(66,), RuntimeError("boom")]
    for stream in (False, True):
        server.http.post("/v1/chat/completions", json={"messages": HELLO, "stream": stream})
    server.engine.script = [RequestTimeout("late")]
    server.http.post("/v1/completions", json={"prompt": "a"})
    asyncio.run(_leave_early(server.app.state.server))
    got = samples(server)
    ends = {name[1]: n for name, n in got.items() if name[0] == "vllm:request_success_total"}
    assert ends == {"stop": 4, "length": 2, "error": 3, "abort": 1}
    assert sum(ends.values()) == len(server.engine.requests)
    assert got["vllm:e2e_request_latency_seconds_count",] == sum(ends.values())
    assert got["vllm:admission_rejections_total", "server_overloaded"] == 1
    assert got["vllm:request_params_n_sum",] == 10


async def _leave_early(server: Any) -> None:
    from leadline.serving.generation import read_choice
    from leadline.text.detokenizer import TextOutput

    server.client.script = [(66,)] * 9
    sampling = SamplingParams(max_tokens=9)
    choice = read_choice(
        server,
        EngineRequest("left", (5, 6), sampling),
        TextOutput(server.tokenizer, sampling),
        "id",
    )
    await anext(choice)
    await choice.aclose()


def test_gauges_show_states_that_add_up() -> None:
    got = parsed(ServingMetrics("m").exposition(STATS))
    reasons = [got["vllm:num_requests_waiting_by_reason", r] for r in ("capacity", "deferred")]
    assert reasons == [3, 2]
    assert [got["leadline:slots", s] for s in ("used", "hot", "free")] == [1, 2, 1]
    assert [got["leadline:kv_pages", s] for s in ("used", "cached", "free")] == [3, 1, 6]


def test_steps_have_kinds_and_a_histogram_of_rows() -> None:
    kinds = {"prefill_steps": 2, "decode_steps": 4, "mixed_steps": 1}
    counts = STATS.counters | kinds | {"step_rows": 400}
    stats = EngineStats(counters=counts, iteration_tokens=STATS.iteration_tokens)
    got = parsed(ServingMetrics("m").exposition(stats))
    steps = [got["leadline:steps_total", "none", k] for k in ("prefill", "decode", "mixed")]
    assert steps == [2, 4, 1]
    assert got["vllm:iteration_tokens_total_bucket", "64.0"] == 5
    assert got["vllm:iteration_tokens_total_count",] == 6
    assert got["vllm:iteration_tokens_total_sum",] == 400


def test_prefix_replaces_vllm_and_nothing_else() -> None:
    got = parsed(ServingMetrics("m", "house_").exposition(STATS))
    assert ("house_num_requests_running",) in got
    assert ("house_time_to_first_token_seconds_count",) in got
    assert ("leadline:kv_pages", "used") in got
    assert not any(name.startswith("vllm:") for name, *_ in got)


@pytest.mark.parametrize("prefix", ["", "9x", "a b", "-"], ids=repr)
def test_prefix_that_is_no_name_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="metrics_prefix"):
        TelemetryConfig(metrics_prefix=prefix)


def test_counters_go_on_after_a_restart_of_the_engine() -> None:
    metrics = ServingMetrics("m")
    seen = []
    for steps, seconds in ((5, 2.0), (7, 3.0), (2, 0.5), (3, 1.0)):  # the third is a new engine
        stats = EngineStats(
            counters=STATS.counters | {"steps": steps, "generation_tokens": steps},
            step_seconds={"forward": seconds},
            iteration_tokens=[(math.inf, steps)],
        )
        got = parsed(metrics.exposition(stats))
        seen.append(
            (
                got["vllm:generation_tokens_total",],
                got["vllm:iteration_tokens_total_bucket", "+Inf"],
                got["leadline:step_seconds_total", "forward"],
            )
        )
    assert seen == [(5, 5, 2.0), (7, 7, 3.0), (9, 9, 3.5), (10, 10, 4.0)]


def test_times_of_a_request_come_from_the_queue_and_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock: Iterator[float] = itertools.chain((10.0, 13.0, 14.0, 16.0), itertools.repeat(18.0))
    monkeypatch.setattr("leadline.serving.request_record.time.perf_counter", clock.__next__)
    metrics = ServingMetrics("m")
    record = RequestRecord(
        metrics, EngineRequest("r", (1,) * 300, SamplingParams(max_tokens=9)), "id"
    )
    for _ in range(3):
        record.observe(TokenOutput("r", (5,), queue_seconds=1.0, num_cached_tokens=256))
    record.finish("stop", 3)
    got = parsed(metrics.exposition(None))
    assert {
        name: got[f"vllm:{name}_sum",]
        for name in (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "request_time_per_output_token_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "e2e_request_latency_seconds",
            "request_prefill_kv_computed_tokens",
        )
    } == {
        "time_to_first_token_seconds": 3.0,
        "inter_token_latency_seconds": 3.0,
        "request_time_per_output_token_seconds": 1.5,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 5.0,
        "request_inference_time_seconds": 7.0,
        "e2e_request_latency_seconds": 8.0,
        "request_prefill_kv_computed_tokens": 44.0,
    }


@pytest.mark.parametrize(
    ("requests", "queried", "hits", "cached_pages", "warns"),
    [
        pytest.param(1000, 10**6, 0, 5, True, id="never a hit"),
        pytest.param(1000, 10**6, 256, 5, False, id="a hit"),
        pytest.param(999, 10**6, 0, 5, False, id="few requests"),
        pytest.param(1000, 10**6 - 1, 0, 5, False, id="few tokens"),
        pytest.param(1000, 10**6, 0, 0, False, id="caching is off"),
    ],
)
def test_cache_that_never_hits_is_warned_about_once(
    caplog: pytest.LogCaptureFixture,
    requests: int,
    queried: int,
    hits: int,
    cached_pages: int,
    warns: bool,
) -> None:
    metrics = ServingMetrics("m")
    for _ in range(requests):
        metrics.count_finished("stop")
    counts = {"prefix_cache_queries": queried, "prefix_cache_hits": hits}
    stats = EngineStats(num_cached_pages=cached_pages, counters=STATS.counters | counts)
    for _ in range(2):
        metrics.exposition(stats)
    assert len(re.findall("no prefix was found", caplog.text)) == int(warns)


def test_parser_fault_is_counted_by_kind() -> None:
    metrics = ServingMetrics("m")
    metrics.count_faults(["block_without_call"])
    got = parsed(metrics.exposition(None))
    assert got["leadline:parser_faults_total", "block_without_call"] == 1
    assert got["leadline:parser_faults_total", "internal_error"] == 0
