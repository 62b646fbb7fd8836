"""The serving checklist of 96 items: each has tests named by its number, or a reason to wait."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
ITEMS = range(1, 97)
WAITING = {
    16: "images",
    66: "images",
    67: "images",
    88: "drafts",
}


def _covered() -> set[int]:
    names = re.compile(r"def test_(?:c|item_)(\d+)(?:_|\()")
    return {
        int(number)
        for path in TESTS.rglob("test_*.py")
        for number in names.findall(path.read_text(encoding="utf-8"))
    }


def test_every_item_of_the_checklist_has_a_test_or_a_reason_to_wait() -> None:
    missing = [item for item in ITEMS if item not in _covered() | WAITING.keys()]
    assert not missing


def test_what_waits_has_no_test_yet() -> None:
    assert not _covered() & WAITING.keys()
