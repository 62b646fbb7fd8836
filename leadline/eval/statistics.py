"""Means and their standard errors, alone and paired over the same questions.

Questions of one dialogue share their history, so they are not independent: sums of a dialogue's
deviations are what varies (the cluster-robust error). With one question a dialogue that is the
textbook's ``sd / sqrt(n)``; of paired accuracies it is McNemar's.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_ERRORS = 2.0  # a difference of fewer standard errors is no evidence of one


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over ``n`` questions with its standard error, NaN where one dialogue tells none."""

    mean: float
    se: float
    n: int

    @property
    def is_near_zero(self) -> bool:
        """Whether it lies within two standard errors of zero."""
        return abs(self.mean) <= NUM_ERRORS * self.se

    def as_json(self) -> dict[str, Any]:
        """For a file; JSON has no NaN."""
        return {"mean": self.mean, "se": None if math.isnan(self.se) else self.se, "n": self.n}


def estimate(values: Sequence[float], dialogues: Sequence[Hashable]) -> Estimate:
    """The mean of ``values``, of which ``dialogues`` names the independent draws.

    Args:
        values: at least one.
        dialogues: the dialogue of each value.
    """
    x = np.asarray(values, dtype=np.float64)
    mean, n = float(x.mean()), len(x)
    number = {name: i for i, name in enumerate(dict.fromkeys(dialogues))}
    if len(number) < 2:
        return Estimate(mean, math.nan, n)
    sums = np.bincount([number[name] for name in dialogues], weights=x - mean)
    variance = len(number) / (len(number) - 1) * float((sums**2).sum())
    return Estimate(mean, math.sqrt(variance) / n, n)


def difference(
    values: Sequence[float], reference: Sequence[float], dialogues: Sequence[Hashable]
) -> Estimate:
    """How much higher ``values`` are than those of a reference on the same questions."""
    pairs = zip(values, reference, strict=True)
    return estimate([value - other for value, other in pairs], dialogues)
