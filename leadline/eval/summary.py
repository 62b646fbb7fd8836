"""Records -> estimates, by family, cell and arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from leadline.eval.measure import Record
from leadline.eval.statistics import Estimate, difference, estimate

EVERYTHING = "all families"
# Fields of a record whose means are told, and those whose paired change against the reference is.
MEANS = (
    "correct",
    "parses",
    "nll",
    "bits_per_byte",
    "kl_window",
    "kl",
    "flips",
    "num_cached",
    "num_replayed",
)
CHANGES = ("correct", "parses", "nll", "bits_per_byte")

Numbers: TypeAlias = Mapping[str, Estimate]
"""Estimates of an arm on a set of questions: ``MEANS`` by name, ``CHANGES`` as ``NAME_change``.

What no question of the set has is left out.
"""
ByArm: TypeAlias = Mapping[str, Numbers]


@dataclass(frozen=True, slots=True)
class Summary:
    """Numbers of every arm, the reference first; families and cells in the order of the suite.

    Attributes:
        families: family -> arm -> numbers; the last is ``EVERYTHING`` where there are several.
        cells: family -> cell -> arm -> numbers, of families with several.
    """

    families: Mapping[str, ByArm]
    cells: Mapping[str, Mapping[str, ByArm]]

    def as_json(self) -> dict[str, Any]:
        """Cells stand in their families."""
        return {
            family: {
                "arms": _as_json(arms),
                "cells": {
                    cell: _as_json(of_cell) for cell, of_cell in self.cells.get(family, {}).items()
                },
            }
            for family, arms in self.families.items()
        }


def summarise(records: Mapping[str, Sequence[Record]]) -> Summary:
    """Estimates of each arm's records.

    Args:
        records: the reference's first; those of all arms are about the same questions, in order.
    """
    reference = next(iter(records.values()))
    families: dict[str, list[int]] = {}
    cells: dict[str, dict[str, list[int]]] = {}
    for i, record in enumerate(reference):
        families.setdefault(record.family, []).append(i)
        cells.setdefault(record.family, {}).setdefault(record.cell, []).append(i)
    if len(families) > 1:
        families[EVERYTHING] = list(range(len(reference)))

    def by_arm(chosen: Sequence[int]) -> ByArm:
        base = [reference[i] for i in chosen]
        return {arm: numbers_of([rows[i] for i in chosen], base) for arm, rows in records.items()}

    return Summary(
        {family: by_arm(chosen) for family, chosen in families.items()},
        {
            family: {cell: by_arm(chosen) for cell, chosen in of_family.items()}
            for family, of_family in cells.items()
            if len(of_family) > 1
        },
    )


def numbers_of(records: Sequence[Record], reference: Sequence[Record]) -> Numbers:
    """Estimates over an arm's records, and against the reference's of the same questions."""
    found: dict[str, Estimate] = {}
    for name in MEANS:
        rows = [
            (float(value), float(getattr(base, name)), (record.family, record.dialogue))
            for record, base in zip(records, reference, strict=True)
            if (value := getattr(record, name)) is not None
        ]
        if not rows:
            continue
        values, base_values, dialogues = zip(*rows, strict=True)
        found[name] = estimate(values, dialogues)
        if name in CHANGES:
            found[f"{name}_change"] = difference(values, base_values, dialogues)
    return found


def _as_json(arms: ByArm) -> dict[str, Any]:
    return {
        arm: {name: number.as_json() for name, number in numbers.items()}
        for arm, numbers in arms.items()
    }
