"""Samples for eyes."""

from __future__ import annotations

import sys

import pytest

from leadline.eval.tasks.__main__ import main


def test_a_sample_shows_the_markers_of_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tasks", "tool_calls", "--size", "300", "--seed", "1"])
    main()
    shown = capsys.readouterr().out
    assert shown.startswith("--- tool_calls\n<｜begin▁of▁sentence｜>")
    assert "<｜User｜>" in shown
    assert "### Available Tool Schemas" in shown
