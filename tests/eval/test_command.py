"""``leadline eval`` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leadline.cli import main
from leadline.eval import picture

SMALL = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "32MiB", "--max-num-seqs", "16")


def run(model: Path, out: Path, *flags: str) -> Any:
    assert main(["eval", str(model), "--items", "1", *SMALL, "--out", str(out), *flags]) == 0
    return json.loads((out / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def out(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("out")
    flags = ("--families", "recall,multiple_choice", "--arms", "replay-both")
    run(model, folder, "--arm", "few:index_topk=4", *flags)
    return folder


def test_one_command_writes_numbers_tables_and_a_picture(out: Path) -> None:
    found = json.loads((out / "evaluation.json").read_text())
    assert list(found["arms"]) == ["exact", "replay-both", "few"]
    assert list(found["families"]) == ["recall", "multiple_choice", "all families"]
    assert found["circumstances"]["command"].startswith("leadline eval ")
    assert found["circumstances"]["settings"]["max_model_len"] == 1024
    assert found["work"]["exact"]["replayed_tokens"] == 0
    assert "## Conclusions" in (out / "evaluation.md").read_text()
    assert (out / "evaluation.png").exists() is picture.is_available()


def test_what_is_longer_than_the_model_is_left_out_and_told(out: Path) -> None:
    found = json.loads((out / "evaluation.json").read_text())
    assert found["circumstances"]["dialogues left out as too long"] >= 3
    assert found["families"]["recall"]["arms"]["exact"]["nll"]["n"] < 5


def test_a_picture_that_cannot_be_drawn_is_told_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(picture, "is_available", lambda: False)
    assert main(["eval", "--picture", "--out", str(tmp_path / "out")]) == 2
    assert "install leadline[eval]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
