"""The benchmark scripts run, and their result files say what was measured where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = (
    "cpu_speed",
    "decode_profile",
    "replay_deviation",
    "scheduler_cost",
    "simulated_day",
    "streaming_cost",
)


def run(script: str, *options: str, folder: Path) -> dict[str, Any]:
    """The result file of a smoke run."""
    path = folder / f"{script}.json"
    command = [sys.executable, f"benchmarks/{script}.py", "--quick", "--threads=1", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*command, f"--json={path}"], cwd=ROOT, env=environment, check=True, capture_output=True
    )
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("benchmarks")
    options = {"cpu_speed": ("--unquantized",)}
    return {script: run(script, *options.get(script, ()), folder=folder) for script in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_result_names_its_command_commit_and_machine(
    script: str, results: dict[str, dict[str, Any]]
) -> None:
    result = results[script]
    assert f"benchmarks/{script}.py --quick" in result["command"]
    assert result["threads"] == 1
    for key in ("date", "commit", "device", "cores", "python", "torch", "preset", "dtype"):
        assert result[key], key


def test_speed_stands_beside_the_plain_forward(results: dict[str, dict[str, Any]]) -> None:
    cases = results["cpu_speed"]["cases"]
    assert [case["case"] for case in cases] == ["decode", "decode", "prefill"]
    for case in cases:
        assert case["ratio"]["runs"] == [
            ours / plain
            for ours, plain in zip(case["ours"]["runs"], case["plain"]["runs"], strict=True)
        ]
        for way in ("ours", "eager", "plain"):
            assert 0 < case[way]["min"] <= case[way]["median"] <= case[way]["max"]


def test_decoding_stands_below_a_roof_that_rises_with_the_batch(
    results: dict[str, dict[str, Any]],
) -> None:
    """A second request costs less than a second step: it reads most weights along with the first.

    The 22 M shape uses 6.8 M weights a token (tiny-model.md 3).
    """
    weights = results["cpu_speed"]["step_weights"]
    assert weights["dense"] + weights["per_row"] * weights["experts"] == pytest.approx(
        6.8e6, rel=0.02
    )
    one, two = (case["roof"] for case in results["cpu_speed"]["cases"] if "roof" in case)
    assert 0 < one < two


def test_both_ways_give_the_same_greedy_tokens_without_quantisers(
    results: dict[str, dict[str, Any]],
) -> None:
    for case in results["cpu_speed"]["cases"]:
        assert case["same_tokens"] == case["compared_tokens"] > 0


def test_the_profile_accounts_for_a_whole_step(results: dict[str, dict[str, Any]]) -> None:
    [case] = results["decode_profile"]["cases"]
    assert case["concurrency"] == 8
    shares = {part: entry["percent"] for part, entry in case["parts"].items()}
    assert set(shares) == {"schedule", "build", "forward", "sample"}
    assert 0 < sum(shares.values()) <= 100
    assert case["schedule_and_build_percent"] == pytest.approx(shares["schedule"] + shares["build"])
    inside = [*case["ops"].values(), case["forward_and_sample_outside_ops"]]
    total = sum(op["percent"] for op in inside)
    assert total == pytest.approx(shares["forward"] + shares["sample"])
    assert case["ops"]["sparse_attention"]["calls"] == 12  # once a layer


def test_the_cost_of_a_step_is_that_of_planning_building_and_booking_it(
    results: dict[str, dict[str, Any]],
) -> None:
    [case] = results["scheduler_cost"]["cases"]
    assert (case["running"], case["waiting"]) == (8, 64)
    for part in ("plan", "build", "apply"):
        assert len(case[f"{part}_ms"]["runs"]) == 4
        assert case[f"{part}_ms"]["median"] > 0


def test_a_day_stands_beside_the_same_day_without_caching(
    results: dict[str, dict[str, Any]],
) -> None:
    days = results["simulated_day"]["days"]
    assert list(days) == ["bounded", "exact", "off"]
    assert days["bounded"]["rows_ratio"] < days["off"]["rows_ratio"] == 1
    assert all(day["same_text_as_off"] for day in days.values())


def test_replay_deviates_less_by_its_upper_half(results: dict[str, dict[str, Any]]) -> None:
    cases = results["replay_deviation"]["cases"]
    assert [(case["arm"], case["tokens"]) for case in cases] == [
        (arm, tokens) for arm in ("lower", "upper", "both") for tokens in ("first", "decode")
    ]
    medians = {(c["arm"], c["tokens"]): c["mean_deviation"]["p50"] for c in cases}
    for tokens in ("first", "decode"):
        assert 0 < medians["upper", tokens] < medians["lower", tokens]
    for case in cases:
        deviation = case["mean_deviation"]
        assert deviation["p0"] <= deviation["mean"] <= deviation["p90"] <= deviation["p100"]
        assert case["kl"]["p0"] >= 0


def test_every_token_is_an_event_of_its_own(results: dict[str, dict[str, Any]]) -> None:
    [front_end] = results["streaming_cost"]["results"].values()
    assert front_end["events_per_token"]["median"] == 1
    assert front_end["tokens_per_second"]["median"] > 0
    for streams in (1, 64):
        added = front_end[f"latency_{streams}"]
        assert 0 < added["p50"] <= added["p99"] <= added["max"]
