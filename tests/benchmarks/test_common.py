"""What a GPU's clock and power are read from."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.common import last_reading, watched_gpu


@pytest.mark.parametrize(
    ("output", "reading"),
    [
        ("1980, 649.15\n1860, 696.39\n", {"mhz": 1860.0, "watts": 696.39}),
        ("1980, 649.15\n1860, 69", {"mhz": 1980.0, "watts": 649.15}),
        ("1980, 650\n1860, [N/A]\n", {"mhz": 1980.0, "watts": 650.0}),
        ("1980, 649.15", {}),
        ("No devices were found\n", {}),
        ("", {}),
    ],
)
def test_the_last_whole_line_counts(output: str, reading: dict[str, float]) -> None:
    assert last_reading(output) == reading


def test_a_machine_without_the_tool_has_no_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with watched_gpu() as found:
        assert found == {}
    assert found == {}


def test_readings_are_those_of_the_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool, started = tmp_path / "nvidia-smi", tmp_path / "started"
    tool.write_text(f"#!/bin/sh\necho 1980, 70.5; : > {started}; exec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with watched_gpu() as found:
        end = time.monotonic() + 30
        while not started.exists() and time.monotonic() < end:
            time.sleep(0.01)
    assert found == {"mhz": 1980.0, "watts": 70.5}
