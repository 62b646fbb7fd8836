"""The benchmark beside transformers, where that is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.v4_cpu", "--quick", "--threads=1"]


def test_both_ways_say_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.24", reason="transformers is not installed")
    path = tmp_path / "found.json"
    subprocess.run([*COMMAND, f"--json={path}"], cwd=ROOT, check=True, capture_output=True)
    result = json.loads(path.read_text(encoding="utf-8"))
    assert [case["case"] for case in result["cases"]] == ["decode", "decode", "prefill"]
    for case in result["cases"]:
        assert case["same_tokens"] == case["compared_tokens"] > 0
        assert case["ratio"]["runs"] == [
            ours / theirs
            for ours, theirs in zip(case["ours"]["runs"], case["transformers"]["runs"], strict=True)
        ]


def test_without_transformers_it_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['transformers'] = None; sys.argv = ['v4_cpu', '--quick']; "
    code = f"{hidden}from benchmarks.v4_cpu import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert 'pip install "transformers>=5.24"' in done.stderr
