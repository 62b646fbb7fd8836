"""What must be shown has tests named by its number, or a reason to wait.

The numbers are those of the serving checklist (serving-api 17: ``c1`` to ``c68`` and ``item_69`` to
``item_96`` in the names of tests) and of the user reports (``r1`` to ``r15``, ``e1`` to ``e6``).
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
ITEMS = range(1, 97)
WAITING = {
    16: "images",
    66: "images",
    67: "images",
    88: "drafts",
}
REPORTS = {f"r{i}" for i in range(1, 16)} | {f"e{i}" for i in range(1, 7)}


@cache
def numbers() -> frozenset[str]:
    """The parts of test names that are numbers of something: ``c12``, ``item_72``, ``r3``."""
    return frozenset(
        number
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"def test_(\w+)", path.read_text(encoding="utf-8").lower())
        for number in re.findall(r"(?:^|(?<=_))(?:c\d+|items?_\d+|[re]\d+)(?=_|$)", name)
    )


def covered() -> set[int]:
    """Items of the checklist that have a test."""
    return {int(re.sub(r"\D", "", number)) for number in numbers() if number[0] in "ci"}


def test_every_item_of_the_checklist_has_a_test_or_a_reason_to_wait() -> None:
    assert not set(ITEMS) - covered() - WAITING.keys()


def test_what_waits_has_no_test_yet() -> None:
    assert not covered() & WAITING.keys()


def test_every_user_report_has_a_test() -> None:
    assert not REPORTS - numbers()
