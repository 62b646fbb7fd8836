"""What an evaluation says: JSON with all numbers, Markdown, and a table for the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from leadline.eval.conclusions import conclusions
from leadline.eval.statistics import Estimate
from leadline.eval.summary import ByArm, Numbers, Summary


@dataclass(frozen=True, slots=True)
class Report:
    """An evaluation that has ended.

    Attributes:
        summary: the numbers.
        arms: name -> what it is in a few words, the reference first.
        circumstances: command, versions, device, seed, settings: what it takes to run it again.
        work: what each arm's engine counted.
    """

    summary: Summary
    arms: Mapping[str, str]
    circumstances: Mapping[str, Any]
    work: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def json(self) -> str:
        """Everything, for programs."""
        content = {
            "circumstances": self.circumstances,
            "arms": self.arms,
            "families": self.summary.as_json(),
            "conclusions": list(conclusions(self.summary)),
            "work": self.work,
        }
        return json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n"

    def markdown(self) -> str:
        """Everything but what programs need only."""
        return "\n".join(self._markdown()) + "\n"

    def _markdown(self) -> Iterator[str]:
        reference = next(iter(self.arms))
        yield f"# Evaluation of {self.circumstances['model']}"
        yield ""
        yield f"`{self.circumstances['command']}`"
        yield ""
        for name, meaning in self.arms.items():
            yield f"* **{name}**: {meaning}"
        yield ""
        yield "## Families"
        yield ""
        yield from _markdown_table("family", self.summary.families, reference)
        yield ""
        if found := list(conclusions(self.summary)):
            yield "## Conclusions"
            yield ""
            yield from (f"* {sentence}" for sentence in found)
            yield ""
        for family, cells in self.summary.cells.items():
            yield f"## {family}, by cell"
            yield ""
            yield from _markdown_table("cell", cells, reference)
            yield ""
        yield "## Circumstances"
        yield ""
        yield from (f"* {name}: {value}" for name, value in self.circumstances.items())

    def table(self) -> Table:
        """The families in the width of a terminal."""
        table = Table(
            title=f"Evaluation of {self.circumstances['model']}",
            box=SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        titles, rows = _rows(self.summary.families, next(iter(self.arms)))
        shown = [i for i, title in enumerate(titles) if title in _NARROW]
        for title in ("family", "arm"):
            table.add_column(title, no_wrap=True)
        for i in shown:
            table.add_column(titles[i], justify="right", no_wrap=True)
        last = ""
        for family, arm, cells in rows:
            if family != last:
                table.add_section()
            table.add_row("" if family == last else family, arm, *(cells[i] for i in shown))
            last = family
        return table


def percent(number: Estimate | None, *, signed: bool = False, form: str = ".1f") -> str:
    """A share and its error in percent, or in percentage points."""
    return quantity(number, 100, form, signed=signed)


def quantity(
    number: Estimate | None, scale: float = 1, form: str = ".4f", *, signed: bool = False
) -> str:
    """``mean ± error``; empty where there is no number, no error where it is not known."""
    if number is None:
        return ""
    mean = f"{number.mean * scale:{'+' if signed else ''}{form}}"
    return mean if math.isnan(number.se) else f"{mean} ± {number.se * scale:{form}}"


def _cells(numbers: Numbers, *, is_reference: bool) -> dict[str, str]:
    """Texts of a row by their columns; changes are to the reference, paired."""
    get = numbers.get
    alone = {
        "n": str(max(number.n for number in numbers.values())),
        "right, %": percent(get("correct")),
        "parses, %": percent(get("parses")),
        "bits per byte": quantity(get("bits_per_byte"), form=".3f"),
        "NLL, nats": quantity(get("nll"), form=".3f"),
    }
    if is_reference:
        return alone
    return alone | {
        "change, pp": percent(get("correct_change"), signed=True),
        "NLL change": quantity(get("nll_change"), signed=True),
        "KL, first window": quantity(get("kl_window")),
        "KL, answer": quantity(get("kl")),
        "flips, %": percent(get("flips"), form=".2f"),
    }


_TITLES = (
    "n",
    "right, %",
    "change, pp",
    "parses, %",
    "bits per byte",
    "NLL, nats",
    "NLL change",
    "KL, first window",
    "KL, answer",
    "flips, %",
)


# What a terminal has room for.
_NARROW = ("n", "right, %", "change, pp", "KL, first window")


def _rows(
    groups: Mapping[str, ByArm], reference: str
) -> tuple[list[str], list[tuple[str, str, list[str]]]]:
    """Titles of the columns that are not empty, and rows: group, arm, texts."""
    found = [
        (group, arm, _cells(numbers, is_reference=arm == reference))
        for group, arms in groups.items()
        for arm, numbers in arms.items()
    ]
    titles = [title for title in _TITLES if any(cells.get(title) for _, _, cells in found)]
    return titles, [
        (group, arm, [cells.get(title, "") for title in titles]) for group, arm, cells in found
    ]


def _markdown_table(first: str, groups: Mapping[str, ByArm], reference: str) -> Iterator[str]:
    titles, rows = _rows(groups, reference)
    yield _markdown_row([first, "arm", *titles])
    yield _markdown_row(["---", "---", *("---:" for _ in titles)])
    for group, arm, cells in rows:
        yield _markdown_row([group, arm, *cells])


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
