"""The suite: which exercises are asked, and how many of each (tiny-model 2).

Every exercise follows from a seed and its place alone: arms and machines get the same ones, and a
larger suite holds those of a smaller one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from leadline.config.args import closest
from leadline.core.errors import ConfigError
from leadline.eval import heldout
from leadline.eval.exercise import Exercise
from leadline.eval.options import Scale
from leadline.eval.tasks import FAMILIES

Source: TypeAlias = Callable[[str, int], Sequence[Exercise]]
"""The first so many exercises of a seed."""


@dataclass(frozen=True, slots=True)
class Part:
    """Exercises of one family.

    Attributes:
        family: its name in reports.
        cells: a source for each cell, the quick ones first.
        quick: cells of a quick evaluation, and exercises in each.
        standard: exercises in each cell.
        full: the same, as many as the study wants.
        is_chat: whether there are answers to judge, and not only text to predict.
    """

    family: str
    cells: Sequence[Source]
    quick: tuple[int, int]
    standard: int
    full: int
    is_chat: bool = True

    def exercises(self, scale: Scale, seed: int, items: int | None = None) -> list[Exercise]:
        """All of a scale, cell by cell; ``items`` takes the place of its number per cell."""
        num_cells, count = len(self.cells), self.full if scale == "full" else self.standard
        if scale == "quick":
            num_cells, count = self.quick
        return [
            exercise
            for cell, source in enumerate(self.cells[:num_cells])
            for exercise in source(f"evaluation {seed} {self.family} {cell}", items or count)
        ]


def choose_parts(families: str | None) -> list[Part]:
    """Those named, with commas between them, in the suite's order; None is all.

    Raises:
        ConfigError: an unknown name.
    """
    if families is None:
        return list(PARTS)
    names = [name.strip() for name in families.split(",")]
    known = [part.family for part in PARTS]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"families has {name!r}{closest(name, known)}; there are {', '.join(known)}"
            )
    return [part for part in PARTS if part.family in names]


LENGTHS = (256, 1024, 2048, 4096, 8192)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def _chats(family: str, size: int, *, thinking: bool = False, **arguments: object) -> Source:
    """Chats of about so many tokens."""
    make = partial(FAMILIES[family].make, size=size, thinking=thinking, **arguments)

    def source(seed: str, count: int) -> list[Exercise]:
        return [make(random.Random(f"{seed} {i}")) for i in range(count)]

    return source


PARTS = (
    Part(
        "recall",
        [_chats("recall", size, num_questions=1) for size in LENGTHS],
        quick=(2, 6),
        standard=24,
        full=2000,
    ),
    Part(
        "needle",
        [
            _chats("needle", size, depth=depth, num_questions=1)
            for size in (512, *LENGTHS[1:])
            for depth in DEPTHS
        ],
        quick=(5, 2),
        standard=4,
        full=200,
    ),
    Part("two_hop", [_chats("two_hop", 512)], quick=(1, 4), standard=60, full=2000),
    Part(
        "multi_turn",
        [_chats("multi_turn", 768, num_turns=8)],
        quick=(1, 5),
        standard=100,
        full=2000,
    ),
    Part("tool_calls", [_chats("tool_calls", 600)], quick=(1, 4), standard=100, full=2000),
    Part(
        "word_problem",
        [_chats("word_problem", 120, thinking=True)],
        quick=(1, 10),
        standard=200,
        full=4000,
    ),
    Part(
        "multiple_choice",
        [_chats("multiple_choice", 300, num_questions=1)],
        quick=(1, 10),
        standard=300,
        full=4000,
    ),
    Part("json_output", [_chats("json_output", 200)], quick=(1, 6), standard=100, full=2000),
    Part("sequences", [_chats("sequences", 100)], quick=(1, 6), standard=100, full=2000),
    Part("prose", [heldout.passages], quick=(1, 2), standard=40, full=1000, is_chat=False),
)
