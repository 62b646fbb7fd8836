from __future__ import annotations

import math

import pytest

from leadline.core.pace import Pace
from leadline.core.request import FinishReason
from leadline.engine.metrics import ITERATION_BOUNDS, EngineMetrics


def test_steps_are_counted_by_kind_and_by_rows() -> None:
    metrics = EngineMetrics()
    for num_rows, num_prefill_rows in ((4, 0), (8, 0), (9, 9), (20000, 5)):
        metrics.count_step(num_rows, num_prefill_rows)
    kinds = ("steps", "decode_steps", "prefill_steps", "mixed_steps", "step_rows")
    assert [metrics.counters[kind] for kind in kinds] == [4, 2, 1, 1, 20021]
    histogram = dict(metrics.iteration_tokens)
    assert list(histogram) == list(ITERATION_BOUNDS)
    assert [histogram[n] for n in (1, 8, 16, 16384, math.inf)] == [0, 2, 3, 3, 4]


def test_every_end_counts_once() -> None:
    metrics = EngineMetrics()
    metrics.count_end(FinishReason.TIMEOUT)
    assert metrics.finished == dict.fromkeys(FinishReason, 0) | {"timeout": 1}


@pytest.mark.parametrize(
    ("amount", "seconds"), [(1, 1.0), (40, 8.0), (10**6, 60.0)], ids=["least", "pace", "most"]
)
def test_a_pace_tells_how_long_more_will_take(amount: int, seconds: float) -> None:
    now = 0.0
    pace = Pace(lambda: now)
    assert pace.seconds_for(amount) == 1
    for now in (0.0, 2.0, 4.0, 6.0):  # noqa: B007
        pace.count(10)
    now = 8.0  # 40 in 8 s
    assert pace.seconds_for(amount) == pytest.approx(seconds)
