"""Health, models, metrics, request ids."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from leadline.core.client import EngineStats
from leadline.core.errors import ConfigError
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
def test_item_85_models_are_found_by_names_with_slashes(rig: MakeRig, prefix: str) -> None:
    server = rig("", served_model_name=("org/model", "alias"))
    listed = server.http.get(f"{prefix}/models").json()["data"]
    assert [entry["id"] for entry in listed] == ["org/model", "alias"]
    found = server.http.get(f"{prefix}/models/org/model").json()
    assert found == listed[0]
    assert found["max_model_len"] == 8192
    assert found["root"] == "house/tiny"
    assert server.http.get(f"{prefix}/models/other").status_code == 404
    assert server.http.get(f"{prefix}/models/").json()["data"] == listed


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
def test_c56_request_id_is_echoed_or_made(rig: MakeRig, sent: str, is_echoed: bool) -> None:
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


@pytest.mark.parametrize(("stalled", "status"), [(0.0, 200), (299.0, 200), (301.0, 503)])
def test_health_turns_503_when_a_step_hangs(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch, stalled: float, status: int
) -> None:
    async def stats() -> EngineStats:
        return EngineStats(num_running=1, stalled_seconds=stalled)

    server = rig("a", watchdog_timeout=300)
    monkeypatch.setattr(server.engine, "stats", stats)
    reply = server.http.get("/ping")
    assert (reply.status_code, reply.content) == (status, b"")


def test_item_85_aliases_are_models_too(rig: MakeRig) -> None:
    server = rig(
        "</think>a", served_model_name=("org/model",), model_alias=("deepseek-chat=org/model",)
    )
    listed = server.http.get("/v1/models").json()["data"]
    assert [entry["id"] for entry in listed] == ["org/model", "deepseek-chat"]
    assert server.http.get("/v1/models/deepseek-chat").json()["max_model_len"] == 8192
    assert server.chat(model="deepseek-chat")["model"] == "deepseek-chat"
    assert server.chat()["model"] == "org/model"


def test_an_alias_of_no_model_is_refused(rig: MakeRig) -> None:
    with pytest.raises(ConfigError, match="model_alias is 'a=other', but the served names are"):
        rig("a", model_alias=("a=other",))


def test_server_info_shows_settings_and_sizes(rig: MakeRig) -> None:
    info = rig("a", port=1234).http.get("/server_info").json()
    assert info["settings"]["server"]["port"] == 1234
    assert info["cache"] == {
        "num_pages": 10,
        "page_size": 256,
        "bytes_per_token": 890.0,
        "num_slots": 4,
        "slot_bytes": 4096,
    }
    assert info["model"]["max_model_len"] == 8192


def test_load_counts_open_requests(rig: MakeRig) -> None:
    assert rig("a").http.get("/load").json() == {"server_load": 0}


def test_the_administrator_pauses_and_resets(rig: MakeRig) -> None:
    server = rig("a", admin_api_key="root", enable_admin_endpoints=True)
    root = {"Authorization": "Bearer root"}
    assert server.http.post("/pause", headers=root).json() == {"is_paused": True}
    assert server.engine.is_paused
    assert server.http.post("/resume", headers=root).json() == {"is_paused": False}
    assert not server.engine.is_paused
    assert server.http.post("/reset_prefix_cache", headers=root).json() == {"success": True}
    assert server.http.get("/pause", headers=root).status_code == 405


def test_answers_name_who_worked_on_them(rig: MakeRig) -> None:
    server = rig("</think>a")
    replies = [server.http.post("/v1/chat/completions", json={"messages": HELLO}) for _ in "ab"]
    assert len({reply.headers["x-worker-id"] for reply in replies}) == 1
    assert replies[0].headers["x-worker-id"].endswith("-0")


def test_c56_two_requests_of_one_id_both_finish(rig: MakeRig) -> None:
    server = rig("</think>a")

    async def both() -> None:
        gate = server.engine.gate = asyncio.Event()
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            same = {"X-Request-Id": "same"}
            ask = http.post("/v1/chat/completions", json={"messages": HELLO}, headers=same)
            other = http.post("/v1/chat/completions", json={"messages": HELLO}, headers=same)
            replies = asyncio.gather(ask, other)
            while len(server.engine.requests) < 2:
                await asyncio.sleep(0)
            gate.set()
            for reply in await replies:
                assert reply.json()["choices"][0]["message"]["content"] == "a"
                assert reply.headers["x-request-id"] == "same"

    asyncio.run(both())
    first, second = server.engine.requests
    assert first.request_id != second.request_id


def test_probes_that_come_together_ask_the_engine_once(rig: MakeRig) -> None:
    server = rig("")
    num_asked = 0

    async def stats() -> EngineStats:
        nonlocal num_asked
        num_asked += 1
        for _ in range(100):  # turns of the loop
            await asyncio.sleep(0)
        return EngineStats()

    server.engine.stats = stats  # type: ignore[method-assign]

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            replies = await asyncio.gather(*(http.get("/health") for _ in range(20)))
            return [reply.status_code for reply in replies]

    assert asyncio.run(ask()) == [200] * 20
    assert num_asked == 1
