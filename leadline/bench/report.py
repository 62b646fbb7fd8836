"""What runs were like, in numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from leadline.bench.measure import Run

MILLISECONDS = 1e3

# name -> what one run gives; a list is of requests or tokens.
MEASURES: dict[str, Callable[[Run], list[float]]] = {
    "time to first token, ms": lambda run: [MILLISECONDS * t for t in run.ttft],
    "time between tokens, ms": lambda run: [MILLISECONDS * t for t in run.gaps],
    "whole run, s": lambda run: [run.seconds],
    "prompt tokens/s": lambda run: [run.input_tokens / run.seconds],
    "output tokens/s": lambda run: [run.output_tokens / run.seconds],
}
QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


def summary(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Of each measure, over the values of all runs: quantiles, ends, and the median of each run."""
    found: dict[str, dict[str, Any]] = {}
    for name, values_of in MEASURES.items():
        each = [values_of(run) for run in runs]
        values = [value for part in each for value in part]
        if not values:  # answers of one token have no gaps
            continue
        found[name] = {quantile: float(np.quantile(values, q)) for quantile, q in QUANTILES.items()}
        found[name] |= {"min": min(values), "max": max(values), "count": len(values)}
        found[name]["runs"] = [float(np.median(part)) for part in each]
    return found


def table(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Header and rows."""
    columns = [*QUANTILES, "min", "max"]
    rows = [[name, *(f"{values[c]:.4g}" for c in columns)] for name, values in found.items()]
    return [["", *columns], *rows]
