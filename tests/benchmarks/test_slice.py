"""Sections of ``benchmarks/slice.py`` measure what they say; what is cut off keeps the rest."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import slice as driver
from benchmarks.day import Shape, check_idle, make_sessions
from benchmarks.sections import SECTIONS, decode, sessions, soak, ttft
from benchmarks.sections.section import Bench, Case, Engines, Section, Table
from leadline.cache.sizing import pages_of
from leadline.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from leadline.core.errors import LeadlineError
from leadline.core.request import EngineRequest, FinishReason, SamplingParams, TokenOutput
from leadline.engine import launch
from leadline.engine.launch import build_engine

ROOT = Path(__file__).parents[2]
TINY = EngineConfig(
    model="tiny-window128",
    load_format="dummy",
    device="cpu",
    kernel_backend="reference",
    max_model_len=2048,
    cache=CacheConfig(kv_cache_memory_bytes=8 * 2**20),
    scheduler=SchedulerConfig(max_num_seqs=4),
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a smoke run of all sections."""
    path = tmp_path_factory.mktemp("slice") / "slice.json"
    command = [sys.executable, "-m", "benchmarks.slice", "--quick", "--threads=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, f"--json={path}"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for section in SECTIONS.values():
        assert section.title in done.stdout
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_v4_decodes_without_bounds(tmp_path: Path) -> None:
    path = tmp_path / "slice.json"
    command = [sys.executable, "-m", "benchmarks.slice", "--quick", "--threads=1"]
    only = ["--preset", "tiny-v4", "--sections", "decode", f"--json={path}"]
    subprocess.run([*command, *only], cwd=ROOT, check=True, capture_output=True)
    cases = json.loads(path.read_text(encoding="utf-8"))["sections"]["decode"]
    assert len(cases) == 3
    assert all(case["us"]["min"] > 0 and case["bound_us"] is None for case in cases)


def test_a_run_names_its_command_machine_and_versions(result: dict[str, Any]) -> None:
    assert result["command"].startswith("python -m benchmarks.slice --quick")
    for key in ("date", "commit", "device", "cores", "python", "torch", "preset", "dtype"):
        assert result[key], key


def test_every_section_ran_to_its_end(result: dict[str, Any]) -> None:
    assert list(result["sections"]) == list(SECTIONS)
    assert result["failures"] == {}


def test_every_prompt_has_a_time_in_every_mode(result: dict[str, Any]) -> None:
    cases = result["sections"]["ttft"]
    assert [(case["mode"], case["prompt_tokens"]) for case in cases] == [
        (mode, length) for mode in ttft.MODES for length in ttft.QUICK
    ]
    assert all(case["ms"]["median"] > 0 for case in cases)


def test_every_batch_has_a_time_at_every_context(result: dict[str, Any]) -> None:
    assert [(c["context"], c["batch"]) for c in result["sections"]["decode"]] == [
        (context, batch)
        for contexts_of in decode.QUICK.batches.values()
        for context, batches in contexts_of.items()
        for batch in batches
    ]


def test_both_arms_play_the_same_sessions(result: dict[str, Any]) -> None:
    cases = result["sections"]["sessions"]
    arms: dict[str, list[Any]] = {arm: [] for arm in sessions.ARMS}
    for case in cases:
        arms[case["arm"]].append((case["lanes"], case["prompt_tokens"], case["output_tokens"]))
    assert arms["all"] == arms["day0"]
    assert all(case["hit_rate"] > 0 for case in cases)


def test_8_bit_records_take_more_than_4_bit_ones(result: dict[str, Any]) -> None:
    fp4, fp8, *peers = result["sections"]["capacity"]
    assert fp4["pages_bytes"] < fp8["pages_bytes"]
    assert fp4["slot_bytes"] == fp8["slot_bytes"] > 0
    for case in (fp4, fp8):
        pages = pages_of(case["tokens"], 256)
        assert case["pages_bytes"] == pages * 256 * case["bytes_per_token"]
    assert all(case["records"].startswith("584") for case in peers)


def test_a_soak_compares_its_thirds(result: dict[str, Any]) -> None:
    [case] = result["sections"]["soak"]
    assert case["finished"] > 0 < case["aborted"]
    for key in ("host_bytes", "device_bytes", "median_step_ms", "longest_step_ms"):
        assert len(case[key]) == 3


def cut(seconds: Iterator[float], cases: Iterator[Case]) -> tuple[list[Case], str | None]:
    """A section of these cases, measured until no second is left."""

    def table(found: Sequence[Case]) -> Table:
        raise AssertionError(found)

    bench = Bench("tiny-22m", quick=True, seconds=lambda: next(seconds), log=lambda _: None)
    saved: list[list[Case]] = []
    section = Section("three cases", lambda _: cases, table)
    found, failure = driver.measure(section, bench, lambda cases: saved.append(list(cases)))
    assert saved == [found[: i + 1] for i in range(len(found))]
    return found, failure


def test_no_case_begins_when_time_is_over() -> None:
    found, failure = cut(iter([5.0, 4.0, -1.0]), iter([{"n": 1}, {"n": 2}, {"n": 3}]))
    assert (len(found), failure) == (2, "time was over")


def test_a_section_that_comes_too_late_does_not_begin() -> None:
    assert cut(iter([0.0]), iter([{"n": 1}])) == ([], "time was over")


def test_a_case_that_fails_leaves_those_before_it() -> None:
    def cases() -> Iterator[Case]:
        yield {"n": 1}
        raise LeadlineError("no memory")

    found, failure = cut(iter([5.0, 4.0]), cases())
    assert len(found) == 1
    assert failure is not None
    assert "no memory" in failure


def test_weights_are_loaded_again_only_for_settings_of_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = []

    def load_model(config: EngineConfig) -> launch.LoadedModel:
        loaded.append(config)
        return launch.load_model(config)

    monkeypatch.setattr("benchmarks.sections.section.load_model", load_model)
    engines = Engines(log=lambda _: None)
    first = engines.get(TINY)
    assert engines.get(TINY) is first
    exact = engines.get(replace(TINY, cache=replace(TINY.cache, swa_bounded_replay=False)))
    assert exact is not first
    assert len(loaded) == 1
    engines.get(replace(TINY, seed=1))
    assert len(loaded) == 2


def test_decoding_feeds_one_row_of_every_request_and_leaves_nothing() -> None:
    engine = build_engine(TINY)
    decoding = decode.Decoding(engine, 3, 1024, warmup=1)
    rows = engine.stats().counters["step_rows"]
    assert len(decoding.step_us(4)) == 4
    counters = engine.stats().counters
    assert counters["step_rows"] == rows + 3 * 4
    assert counters["computed_tokens"] == 0
    decoding.stop()
    check_idle(engine)


def test_a_closed_loop_ends_all_turns_and_never_plays_more_than_its_lanes() -> None:
    engine = build_engine(TINY)
    shape = Shape(
        turns=(2, 3), group=2, system=(40, 50), task=(5, 9), new=(3, 5), answer=(1, 4),
        long_answers_in=10**9,
    )  # fmt: skip
    played = make_sessions(5, shape, vocab_size=500, seed=0)
    most = 0
    step = engine.step

    def watched() -> Any:
        nonlocal most
        stats = engine.stats()
        most = max(most, stats.num_running + stats.num_waiting)
        return step()

    engine.step = watched  # type: ignore[method-assign]
    turns = sessions.closed_loop(engine, played, lanes=2)
    assert most == 2
    assert len(turns) == sum(len(session.added) for session in played)
    assert all(session.num_tokens == len(session.text) for session in played)
    assert sum(len(turn.came) for turn in turns) == sum(sum(s.answers) for s in played)


def test_a_soak_fails_when_a_request_does() -> None:
    engine = build_engine(TINY)
    failed = TokenOutput("soak-1", finish_reason=FinishReason.ERROR, error="no pages")
    engine.step = lambda: [failed]  # type: ignore[method-assign]
    with pytest.raises(LeadlineError, match="request soak-1: no pages"):
        soak.Traffic(engine, soak.QUICK, seed=0).step()


def test_a_soak_fails_when_a_page_stays_away() -> None:
    engine = build_engine(TINY)
    engine.add(EngineRequest("somebody", (5, 6, 7), SamplingParams(max_tokens=500)))
    engine.step()
    with pytest.raises(AssertionError, match="pages leaked"):
        check_idle(engine)


def test_the_same_seed_is_the_same_traffic() -> None:
    ends = []
    for _ in range(2):
        traffic = soak.Traffic(build_engine(TINY), soak.QUICK, seed=3)
        for _ in range(12):
            traffic.step()
        traffic.drain()
        ends.append((traffic.finished, traffic.aborted))
    assert ends[0] == ends[1]


def test_thirds_are_of_one_size_and_in_order() -> None:
    values = [random.Random(0).random() for _ in range(11)]
    assert [*map(len, soak.thirds(values))] == [3, 3, 3]
    assert [v for third in soak.thirds(values) for v in third] == values[:9]
