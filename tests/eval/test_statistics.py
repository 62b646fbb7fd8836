from __future__ import annotations

import math
import random

import numpy as np
import pytest

from leadline.eval.statistics import Estimate, difference, estimate


def test_error_of_independent_values_is_the_textbooks() -> None:
    values = [0.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    got = estimate(values, range(6))
    assert got.mean == pytest.approx(4 / 6)
    assert got.se == pytest.approx(np.std(values, ddof=1) / math.sqrt(6))
    assert got.n == 6


def test_error_of_paired_answers_is_mcnemars() -> None:
    """The variance of b - c over n, of b and c discordant pairs."""
    lost, won, n = 7, 3, 200
    reference = [1.0] * lost + [0.0] * won + [1.0] * (n - lost - won)
    values = [0.0] * lost + [1.0] * won + [1.0] * (n - lost - won)
    got = difference(values, reference, range(n))
    assert got.mean == pytest.approx((won - lost) / n)
    variance = (won + lost - (won - lost) ** 2 / n) / (n * (n - 1))
    assert got.se == pytest.approx(math.sqrt(variance))


def test_turns_of_one_dialogue_are_not_independent() -> None:
    """Repeating each value in its dialogue adds nothing to what is known."""
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    once = estimate(values, range(5))
    thrice = estimate(
        [v for v in values for _ in range(3)], [i for i in range(5) for _ in range(3)]
    )
    assert thrice.mean == pytest.approx(once.mean)
    assert thrice.se == pytest.approx(once.se)


@pytest.mark.parametrize("num_turns", [1, 4])
def test_two_errors_cover_the_truth_as_often_as_they_should(num_turns: int) -> None:
    rng = random.Random(0)

    def draw() -> Estimate:
        values, dialogues = [], []
        for dialogue in range(60):
            skill = rng.gauss(0.7, 0.2)
            values += [skill + rng.gauss(0, 0.1) for _ in range(num_turns)]
            dialogues += [dialogue] * num_turns
        return estimate(values, dialogues)

    covered = sum(
        Estimate(e.mean - 0.7, e.se, e.n).is_near_zero for e in (draw() for _ in range(400))
    )
    assert 0.92 < covered / 400 < 0.98


def test_one_dialogue_tells_no_error() -> None:
    got = estimate([0.0, 1.0], ["only", "only"])
    assert math.isnan(got.se)
    assert not got.is_near_zero
    assert got.as_json() == {"mean": 0.5, "se": None, "n": 2}


def test_no_change_at_all_is_near_zero() -> None:
    assert difference([1.0, 0.0], [1.0, 0.0], "ab").is_near_zero
