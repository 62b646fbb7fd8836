"""Angles of rotary embeddings against their definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from leadline.kernels.reference import rope as reference
from leadline.kernels.triton import rope


@pytest.mark.parametrize("half", [8, 12, 32])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_angles_up_to_a_million_positions(device: torch.device, rows: int, half: int) -> None:
    """The product is rounded to float32 in both, or angles there would be others."""
    positions = torch.randint(0, 2**20, (rows,), device=device)
    positions[:1] = 2**20 - 1
    frequencies = reference.rope_frequencies(2 * half, 10000.0).to(device)
    wanted = reference.rope_angles(positions, frequencies)
    actual = rope.rope_angles(positions, frequencies)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=2e-7)
