"""The picture of a log."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from leadline.tools.train_tiny.curves import draw_curves
from leadline.tools.train_tiny.journal import Journal, read_journal

_SVG = "{http://www.w3.org/2000/svg}"


def test_runs_follow_one_another_on_one_axis_of_tokens(tmp_path: Path) -> None:
    entries = []
    for stage in (1, 2):
        file = tmp_path / str(stage) / "log.jsonl"
        journal = Journal(file, stage=stage)
        journal.write("start")
        for tokens in (1_000_000, 2_000_000):
            journal.write("train", tokens=tokens, loss=4.0 / stage)
            journal.write("validation", tokens=tokens, losses={"recall": {"answers": 2.0 / stage}})
        entries += read_journal(file)
    draw_curves(entries, tmp_path / "curves.svg")
    root = ElementTree.parse(tmp_path / "curves.svg").getroot()
    lines = [line.attrib["points"].split() for line in root.iter(f"{_SVG}polyline")]
    assert [len(line) for line in lines] == [3, 2, 2, 4, 4]  # axes, two stages, two curves
    across = [[float(point.split(",")[0]) for point in line] for line in lines[3:]]
    assert all(line == sorted(line) for line in across)
    texts = [text.text for text in root.iter(f"{_SVG}text")]
    assert {"stage 1", "stage 2", "training 2.00", "recall 1.00", "4 M tokens"} <= set(texts)
