"""The exponential function of kernels against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("numba", reason="the extra 'cpu' is not installed")

from leadline.kernels.cpu.exponential import exp
from leadline.kernels.cpu.jit import F1, kernel


@kernel
def exp_of_each(x: F1, out: F1) -> None:
    for i in range(x.shape[0]):
        out[i] = exp(x[i])


def exp_of(*x: float) -> list[float]:
    out = np.empty(len(x), np.float32)
    exp_of_each(np.array(x, np.float32), out)
    return list(out)


def test_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-87.3, 88.7, 200_001).astype(np.float32)
    out = np.empty_like(x)
    exp_of_each(x, out)
    wanted = np.exp(x.astype(np.float64))
    assert np.abs(out / wanted - 1).max() < 2 * 2.0**-23


def test_ends_of_the_range() -> None:
    assert exp_of(0.0, -0.0) == [1.0, 1.0]
    assert exp_of(-math.inf, -1e30, -88.0) == [0.0, 0.0, 0.0]
    assert exp_of(math.inf, 1e30, 89.0) == [math.inf] * 3
    assert math.isnan(exp_of(math.nan)[0])
