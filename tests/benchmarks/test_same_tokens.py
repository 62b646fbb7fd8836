"""Answers of two devices side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import same_tokens


@pytest.mark.parametrize(
    ("found", "wanted", "same", "first", "before"),
    [
        ([[1, 2], [3]], [[1, 2], [3]], 2, 2, 3),
        ([[1, 2, 4], [3]], [[1, 2], [5]], 0, 1, 2),
        ([[1, 7, 4], []], [[1, 2, 4], [5]], 0, 1, 1),
    ],
)
def test_what_follows_the_first_difference_does_not_count(
    found: same_tokens.Answers, wanted: same_tokens.Answers, same: int, first: int, before: int
) -> None:
    result = same_tokens.compare(found, wanted)
    assert result["same_answers"] == same
    assert result["same_first_tokens"] == first
    assert result["tokens_before_one_differs"] == before
    assert (result["answers"], result["tokens"]) == (len(wanted), sum(map(len, wanted)))


def test_without_a_gpu_the_cpus_kernels_stand_beside_the_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "same.json"
    command = ["benchmarks/same_tokens.py", "--quick", f"--json={path}"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    same_tokens.main()
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert [case["model"] for case in cases] == ["v41-tiny", "v4-tiny", "tiny"]
    for case in cases:
        assert case["same_answers"] == case["answers"], case
