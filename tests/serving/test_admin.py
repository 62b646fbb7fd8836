"""Health, models, metrics, request ids."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from leadline.core.version import __version__
from leadline.engine.metrics import COUNTERS
from tests.serving.conftest import HELLO, MakeRig, Rig


def samples(server: Rig) -> dict[tuple[str, ...], float]:
    """Name and labels (but for the model's) -> value of every sample."""
    text = server.http.get("/metrics").text
    return {
        (
            sample.name,
            *(v for k, v in sample.labels.items() if k not in ("model_name", "engine")),
        ): (sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_health_follows_the_engine(rig: MakeRig) -> None:
    server = rig("")
    assert server.http.get("/health").status_code == 200
    server.engine.is_dead = True
    reply = server.http.get("/health")
    assert (reply.status_code, reply.content) == (503, b"")


def test_version_is_the_program(rig: MakeRig) -> None:
    assert rig("").http.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize("prefix", ["/v1", ""], ids=["v1", "bare"])
def test_models_are_listed_and_found_by_names_with_slashes(rig: MakeRig, prefix: str) -> None:
    server = rig("", served_model_name=("org/model", "alias"))
    listed = server.http.get(f"{prefix}/models").json()["data"]
    assert [entry["id"] for entry in listed] == ["org/model", "alias"]
    found = server.http.get(f"{prefix}/models/org/model").json()
    assert found == listed[0]
    assert found["max_model_len"] == 8192
    assert found["root"] == "house/tiny"
    assert server.http.get(f"{prefix}/models/other").status_code == 404


def test_head_is_served_where_get_is(rig: MakeRig) -> None:
    assert rig("").http.head("/health").status_code == 200


def test_metrics_show_requests_and_engine(rig: MakeRig) -> None:
    server = rig("</think>one STOP two")
    server.chat(stop="STOP")
    server.chat(max_tokens=2)
    server.http.post("/v1/chat/completions", json={"messages": []})
    got = samples(server)
    assert got["vllm:num_requests_running",] == 1
    assert got["vllm:kv_cache_usage_perc",] == 0.3
    assert [got["leadline:kv_pages", state] for state in ("used", "cached", "free")] == [3, 1, 6]
    assert got["leadline:slots", "used"] == 1
    assert got["leadline:step_seconds_total", "forward"] == 0.5
    # A stop string is a stop, though the engine saw an abort.
    assert got["vllm:request_success_total", "stop"] == 1
    assert got["vllm:request_success_total", "length"] == 1
    assert got["vllm:time_to_first_token_seconds_count",] == 2
    assert got["vllm:e2e_request_latency_seconds_count",] == 2
    assert got["http_requests_total", "chat_completions", "POST", "200"] == 2
    assert got["http_requests_total", "chat_completions", "POST", "400"] == 1


def test_every_counter_of_the_engine_has_its_name(rig: MakeRig) -> None:
    """Names of vLLM's dashboards where they exist there (serving-api 14)."""
    got = samples(rig("x"))
    names = {name for name, *_ in got if name.startswith(("vllm:", "leadline:"))}
    assert names >= {
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_cached_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "leadline:computed_tokens_total",
        "leadline:replayed_tokens_total",
        "leadline:upper_rows_total",
        "leadline:evicted_pages_total",
    }
    assert got["leadline:evicted_pages_total",] == 99
    assert got["vllm:prefix_cache_hits_total",] == COUNTERS.index("prefix_cache_hits")


def test_metrics_outlive_the_engine(rig: MakeRig) -> None:
    server = rig("a")
    server.chat()
    server.engine.is_dead = True
    got = samples(server)
    assert got["vllm:request_success_total", "stop"] == 1
    assert ("vllm:num_requests_running",) not in got


@pytest.mark.parametrize(
    ("sent", "is_echoed"), [("abc-1", True), ("a b", False), ("x" * 129, False)], ids=str
)
def test_request_id_is_echoed_or_made(rig: MakeRig, sent: str, is_echoed: bool) -> None:
    reply = rig("a").http.post(
        "/v1/chat/completions", json={"messages": HELLO}, headers={"X-Request-Id": sent}
    )
    assert (reply.headers["x-request-id"] == sent) == is_echoed
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize("enabled", [False, True], ids=["default", "enable_log_requests"])
def test_log_holds_a_prompt_only_when_asked(
    rig: MakeRig, caplog: pytest.LogCaptureFixture, enabled: bool
) -> None:
    caplog.set_level("INFO")
    server = rig("secretly</think>said", enable_log_requests=enabled)
    server.chat(messages=[{"role": "user", "content": "mysterious"}])
    assert "reason=stop" in caplog.text
    assert ("mysterious" in caplog.text) == enabled
    assert not any(word in caplog.text for word in ("secretly", "said"))
