"""Fake quantisers give the engine's values, and pass gradients through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from leadline.kernels.reference import quant
from leadline.tools.train_tiny.quantize import fake_fp4_16, fake_fp4_32, fake_fp8_32

PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "fp8_32": (fake_fp8_32, quant.round_trip_fp8_32),
    "fp4_32": (fake_fp4_32, quant.round_trip_fp4_32),
    "fp4_16": (fake_fp4_16, lambda x: quant.dequantize_fp4_16(*quant.quantize_fp4_16(x))),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_are_those_of_the_engine(name: str) -> None:
    fake, exact = PAIRS[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 128, generator=generator) * torch.logspace(-8, 4, 64).unsqueeze(1)
    grid = torch.arange(-28, 29).float().repeat(3)[:128] / 4  # every tie of the E2M1 grid
    x = torch.cat((x, grid.unsqueeze(0), torch.zeros(1, 128)))
    assert torch.equal(fake(x), exact(x))  # but for the sign of zero, which no product shows


@pytest.mark.parametrize("name", PAIRS)
def test_the_gradient_goes_straight_through(name: str) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    upstream = torch.randn(4, 64)
    (gradient,) = torch.autograd.grad(PAIRS[name][0](x), x, upstream)
    assert torch.equal(gradient, upstream)
