"""Pooling of closed groups."""

from __future__ import annotations

import math

import pytest
import torch

from leadline.kernels.reference.compressor import compress


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_equals_a_loop_over_channels(ratio: int) -> None:
    values, gates = torch.randn(2, 3, ratio, 5).double()
    got = compress(values, gates)
    for group in range(3):
        for channel in range(5):
            weights = [math.exp(g) for g in gates[group, :, channel].tolist()]
            pairs = zip(weights, values[group, :, channel].tolist(), strict=True)
            wanted = sum(w * v for w, v in pairs) / sum(weights)
            assert math.isclose(got[group, channel], wanted, rel_tol=1e-12, abs_tol=1e-14)


def test_equal_gates_give_the_mean() -> None:
    values = torch.randn(2, 4, 8)
    torch.testing.assert_close(compress(values, torch.full((2, 4, 8), 7.0)), values.mean(1))


def test_huge_gates_pick_one_row() -> None:
    values, gates = torch.randn(1, 2, 8), torch.zeros(1, 2, 8)
    gates[:, 1] = 1e4
    assert torch.equal(compress(values, gates), values[:, 1])


def test_no_closed_group_gives_no_entry() -> None:
    assert compress(torch.empty(0, 2, 8), torch.empty(0, 2, 8)).shape == (0, 8)
