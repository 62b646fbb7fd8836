"""What a start compiles ahead is what it launches; no kernel runs before that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.kernels.triton.test_tuning import Program


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each step of the program did."""
    program = Program(tmp_path_factory.mktemp("cache"))
    told: dict[str, dict[str, Any]] = json.loads(
        program.run(Path(__file__).with_name("ahead_run.py"))
    )
    return told


def test_all_that_graphs_launch_is_compiled_once_and_before(
    steps: dict[str, dict[str, Any]],
) -> None:
    first, ordinary = steps["first"], steps["ordinary"]
    assert first["compiled"] > 100
    assert first["most"] == 1
    wanted = {"_seam", "_attend", "_gather", "_gate_up", "_choose_rows", "_multiply_arranged"}
    assert wanted <= set(first["kernels"])
    assert (first["launched"], first["measured"]) == (0, 0)
    assert ordinary["compiled"] == 0
    assert ordinary["launched"] > ordinary["measured"] > 0


def test_configs_that_were_not_chosen_are_not_compiled_again(
    steps: dict[str, dict[str, Any]],
) -> None:
    assert 0 < steps["tuned"]["compiled"] < steps["first"]["compiled"] / 2
    assert (steps["again"]["compiled"], steps["again"]["measured"]) == (0, 0)


def test_a_kernel_that_does_not_compile_is_reported_where_it_is_launched(
    steps: dict[str, dict[str, Any]],
) -> None:
    assert steps["broken"]["error"] == ""
    assert steps["broken"]["compiled"] > 0
    assert steps["reported"]["error"] == "_seam is broken"


def test_work_that_fails_ahead_stops_nothing(steps: dict[str, dict[str, Any]]) -> None:
    assert steps["failing"]["error"] == ""


def test_nothing_is_done_where_some_op_is_no_kernel(steps: dict[str, dict[str, Any]]) -> None:
    assert steps["others"]["compiled"] == steps["others"]["launched"] == 0
