"""What the numbers mean, in plain sentences: one a family and arm, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from leadline.eval.statistics import Estimate
from leadline.eval.summary import Numbers, Summary

# Of the rule for defaults: a switch may cost no more than the rounding of the caches does.
ROUNDING_ARM = "kv-nvfp4"
BY_TURN = "multi_turn"


def conclusions(summary: Summary) -> Iterator[str]:
    """Sentences about every arm but the reference."""
    for family, arms in summary.families.items():
        for arm, numbers in list(arms.items())[1:]:
            yield f"{arm}, {family}: {cost(numbers)}."
    yield from _by_turn(summary)
    yield from _against_rounding(summary)


def cost(numbers: Numbers) -> str:
    """What an arm costs on a set of questions."""
    parts = []
    if (change := numbers.get("correct_change")) is not None:
        parts.append(f"right answers {_change(change, 100, '.2f', 'percentage points')}")
    change = numbers["nll_change"]
    parts.append(f"NLL of the right answer {_change(change, 1, '.4f', 'nats per token')}")
    return "; ".join(parts)


def _change(change: Estimate, scale: float, form: str, unit: str) -> str:
    if not change.mean and not change.se:
        return f"as before on all {change.n}"
    mean = f"{change.mean * scale:+{form}}"
    if math.isnan(change.se):
        return f"{mean} {unit}; one dialogue alone tells no error"
    place = "within two standard errors of" if change.is_near_zero else "more than two from"
    return f"{mean} ± {change.se * scale:{form}} {unit}, {place} zero"


def _by_turn(summary: Summary) -> Iterator[str]:
    """How costs grow over the turns of a conversation."""
    cells = summary.cells.get(BY_TURN, {})
    if not cells:
        return
    first, last = next(iter(cells)), next(reversed(list(cells)))
    for arm in list(cells[first])[1:]:
        yield f"{arm} in {first} of a conversation: {cost(cells[first][arm])}."
        yield f"{arm} in {last} of a conversation: {cost(cells[last][arm])}."


def _against_rounding(summary: Summary) -> Iterator[str]:
    """Whether divergences stay below that of the caches' own rounding (tiny-model 2)."""
    arms = list(summary.families.values())[-1]
    rounding = arms.get(ROUNDING_ARM)
    if rounding is None:
        return
    limit = rounding["kl_window"].mean
    for arm, numbers in list(arms.items())[1:]:
        if arm != ROUNDING_ARM:
            kl = numbers["kl_window"].mean
            side = "below" if kl < limit else "above"
            yield (
                f"{arm}: KL {kl:.5f} nats over the first window, {side} the {limit:.5f} of "
                f"{ROUNDING_ARM}, the rounding of the caches"
            )
