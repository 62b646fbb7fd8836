"""OpenTelemetry spans: one for each request, in its caller's trace (serving-api 14)."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from leadline.core.errors import ConfigError
from leadline.serving.tracing import Tracer
from tests.serving.conftest import HELLO, MakeRig, Rig

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What would have been sent to the collector."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(trace_exporter, "OTLPSpanExporter", lambda endpoint: exporter)
    return exporter


def traced(rig: MakeRig, script: str) -> Rig:
    return rig(script, otlp_traces_endpoint="http://collector:4318")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_request_is_one_span_in_its_callers_trace(
    rig: MakeRig, spans: InMemorySpanExporter, stream: bool
) -> None:
    server = traced(rig, "mysterious</think>said")
    server.engine.num_cached_tokens = 2
    server.http.post(
        "/v1/chat/completions",
        json={"messages": HELLO, "temperature": 0.5, "max_tokens": 50, "stream": stream},
        headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"},
    )
    server.app.state.server.tracer.flush()
    [span] = spans.get_finished_spans()
    assert span.name == "llm_request"
    assert format(span.context.trace_id, "032x") == TRACE
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == PARENT
    attributes: Any = dict(span.attributes or {})
    assert (
        attributes.items()
        >= {
            "gen_ai.request.id": "mine",
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.max_tokens": 50,
            "gen_ai.usage.cached_tokens": 2,
            "gen_ai.response.finish_reasons": ("stop",),
        }.items()
    )
    assert attributes["gen_ai.usage.prompt_tokens"] > 0
    assert attributes["gen_ai.usage.completion_tokens"] > 0
    assert attributes["gen_ai.latency.time_to_first_token"] <= attributes["gen_ai.latency.e2e"]
    assert "mysterious" not in str(attributes)


def test_request_without_a_caller_starts_a_trace(rig: MakeRig, spans: InMemorySpanExporter) -> None:
    server = traced(rig, "a</think>b")
    server.chat(n=2)
    server.app.state.server.tracer.flush()
    assert [span.parent for span in spans.get_finished_spans()] == [None, None]


def test_endpoint_gets_the_path_of_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def exporter(endpoint: str) -> InMemorySpanExporter:
        seen.append(endpoint)
        return InMemorySpanExporter()

    monkeypatch.setattr(trace_exporter, "OTLPSpanExporter", exporter)
    Tracer("http://collector:4318")
    Tracer("https://collector/otlp/v1/traces")
    assert seen == ["http://collector:4318/v1/traces", "https://collector/otlp/v1/traces"]


def test_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="write a URL such as"):
        Tracer("collector:4318")


def test_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"leadline\[otel\]"):
        Tracer("http://collector:4318")


def test_packages_stay_out_unless_asked_for(rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert rig("a</think>b").chat()["choices"][0]["message"]["content"] == "b"
