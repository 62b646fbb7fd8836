"""Golden vectors, and the ways in which a sequence can be fed to a model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.steps import AnyStepper, Sequence

GOLDEN = Path(__file__).parents[1] / "golden"
LENGTHS = (1, 7, 120, 130, 300, 700)
Way = Callable[[AnyStepper[Any, Any], list[int], int], Tensor]


@functools.cache
def vectors(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    notes = json.loads((GOLDEN / name / "cases.json").read_text())["cases"]
    if isinstance(notes, list):
        notes = {case["name"]: case for case in notes}
    return load_file(GOLDEN / name / "cases.safetensors"), notes


def one_shot(stepper: AnyStepper[Any, Any], tokens: list[int], prompt: int) -> Tensor:
    """The prompt in one step, then one token a step."""
    sequence = stepper.start(tokens)
    first = stepper.step([(sequence, prompt)])[0]
    return torch.cat((first, stepper.feed(sequence, 1)))


def in_chunks(rows: int) -> Way:
    def run(stepper: AnyStepper[Any, Any], tokens: list[int], prompt: int) -> Tensor:
        sequence = stepper.start(tokens)
        fed = [
            stepper.step([(sequence, min(rows, prompt - at))])[0] for at in range(0, prompt, rows)
        ]
        return torch.cat([*fed, stepper.feed(sequence, 1)])

    return run


def beside_seven_others(stepper: AnyStepper[Any, Any], tokens: list[int], prompt: int) -> Tensor:
    """Every step also feeds seven requests at seven paces, prefill and decode mixed."""
    others = [stepper.start(list(range(i, 90 + 13 * i)), max_len=256) for i in range(7)]
    sequence, rows = stepper.start(tokens), []
    while sequence.fed < len(tokens):
        n = min(64, prompt - sequence.fed) if sequence.fed < prompt else 1
        parts: list[tuple[Sequence, int]] = [(sequence, n)]
        for pace, other in enumerate(others, start=1):
            if left := len(other.tokens) - other.fed:
                parts.insert(pace % 3, (other, min(2 * pace - 1, left)))
        place = [s is sequence for s, _ in parts].index(True)
        rows.append(stepper.step(parts)[place])
    return torch.cat(rows)


WAYS: dict[str, Way] = {
    "one_shot": one_shot,
    "chunks_of_1": in_chunks(1),
    "chunks_of_7": in_chunks(7),
    "chunks_of_64": in_chunks(64),
    "chunks_of_256": in_chunks(256),
    "beside_seven_others": beside_seven_others,
}
