from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from leadline.core.errors import ConfigError
from leadline.eval import picture
from leadline.eval.conclusions import conclusions
from leadline.eval.measure import Record
from leadline.eval.report import Report
from leadline.eval.summary import summarise


def records(family: str, right: list[bool], kl: float, cells: int = 1) -> list[Record]:
    return [
        Record(
            family,
            f"turn {cell + 1}" if cells > 1 else "all",
            i,
            correct=is_right,
            parses=None,
            nll=0.5 + kl + 0.1 * (i % 3),
            kl_window=kl * (1 + i % 2),
            kl=kl,
            flips=0.25 * (not is_right),
            num_cached=64,
            num_replayed=32,
        )
        for i, is_right in enumerate(right)
        for cell in range(cells)
    ]


@pytest.fixture
def report() -> Report:
    good, worse = [True] * 19 + [False], [True] * 12 + [False] * 8
    summary = summarise(
        {
            "exact": records("recall", good, 0) + records("multi_turn", good, 0, 8),
            "replay-both": records("recall", worse, 0.02) + records("multi_turn", good, 0.01, 8),
            "kv-nvfp4": records("recall", good, 0.01) + records("multi_turn", good, 0.01, 8),
        }
    )
    arms = {"exact": "all", "replay-both": "the last rows", "kv-nvfp4": "rounded"}
    return Report(summary, arms, {"model": "tiny", "command": "leadline eval --quick"})


def test_changes_are_paired(report: Report) -> None:
    numbers = report.summary.families["recall"]["replay-both"]
    assert numbers["correct"].mean == pytest.approx(12 / 20)
    assert numbers["correct_change"].mean == pytest.approx(-7 / 20)
    assert numbers["nll_change"].mean == pytest.approx(0.02)
    assert numbers["nll_change"].se == pytest.approx(0, abs=1e-12)  # the same on each question


def test_dialogues_of_two_families_are_not_the_same(report: Report) -> None:
    everything = report.summary.families["all families"]["exact"]
    assert everything["correct"].n == 20 + 20 * 8


def test_json_holds_everything(report: Report) -> None:
    content = json.loads(report.json())
    assert content["circumstances"]["command"] == "leadline eval --quick"
    turns = content["families"]["multi_turn"]["cells"]
    assert list(turns) == [f"turn {i}" for i in range(1, 9)]
    kl = turns["turn 8"]["replay-both"]["kl"]
    assert kl == {"mean": pytest.approx(0.01), "se": pytest.approx(0), "n": 20}
    assert "parses" not in content["families"]["recall"]["arms"]["exact"]


def test_markdown_leaves_out_what_does_not_apply(report: Report) -> None:
    lines = report.markdown().splitlines()
    [head] = [line for line in lines if line.startswith("| family |")]
    assert "parses" not in head
    assert "bits per byte" not in head
    [exact] = [line for line in lines if line.startswith("| recall | exact | 20 | 95.0 ± 5.0 |")]
    assert exact.endswith("|  |  |  |  |")  # changes against itself are not told
    assert any(line.startswith("| turn 8 | kv-nvfp4 | 20 |") for line in lines)


@pytest.mark.parametrize(
    "sentence",
    [
        "replay-both, recall: right answers -35.00 ± 10.94 percentage points, more than two from "
        "zero; NLL of the right answer +0.0200 ± 0.0000 nats per token, more than two from zero.",
        "kv-nvfp4, recall: right answers as before on all 20",
        "replay-both in turn 1 of a conversation: right answers as before on all 20",
        "replay-both in turn 8 of a conversation: ",
        "replay-both: KL 0.01667 nats over the first window, above the 0.01500 of kv-nvfp4",
    ],
)
def test_conclusions_are_plain_sentences(sentence: str, report: Report) -> None:
    assert any(found.startswith(sentence) for found in conclusions(report.summary))


def test_the_terminals_table_fits_it(report: Report) -> None:
    console = Console(width=80, record=True)
    with console.capture() as capture:
        console.print(report.table())
    assert "…" not in capture.get()
    assert "-35.0 ± 10.9" in capture.get()


def test_a_picture_is_drawn(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture.draw(report.summary, tmp_path / "e.png")
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"install leadline\[eval\]"):
        picture.check()
