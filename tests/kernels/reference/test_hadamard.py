"""The Hadamard transform by its definition, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

from leadline.kernels.reference.hadamard import hadamard


@pytest.mark.parametrize("n", [1, 2, 32, 128])
def test_every_value_is_a_sum_with_signs_by_common_bits(n: int) -> None:
    x = torch.randn(3, 2, n).double()
    signs = torch.tensor([[(-1.0) ** (i & k).bit_count() for k in range(n)] for i in range(n)])
    torch.testing.assert_close(hadamard(x), x @ signs.double() * n**-0.5)


def test_twice_is_not_at_all() -> None:
    x = torch.randn(5, 128)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=0, atol=1e-6)


def test_products_of_two_transformed_vectors_are_those_of_the_vectors() -> None:
    q, k = torch.randn(2, 7, 32).double()
    torch.testing.assert_close(hadamard(q) @ hadamard(k).T, q @ k.T)


def test_bfloat16_is_rounded_once() -> None:
    x = torch.randn(4, 64).bfloat16()
    assert torch.equal(hadamard(x), hadamard(x.float()).bfloat16())
