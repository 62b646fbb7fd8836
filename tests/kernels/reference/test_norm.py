"""RMSNorm."""

from __future__ import annotations

import pytest
import torch

from leadline.kernels.reference.norm import rms_norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_equals_the_formula_rounded_once(dtype: torch.dtype) -> None:
    x, weight = (torch.randn(4, 256) * 30).to(dtype), 1 + 0.1 * torch.randn(256)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    got = rms_norm(x, weight.to(wide), eps=1e-20)
    x64 = x.double()
    exact = weight.double() * x64 / x64.square().mean(-1, keepdim=True).sqrt()
    assert got.dtype is dtype
    # In bf16 one rounding; in float32 four operations, each with its own.
    rtol = {torch.bfloat16: 2**-8, torch.float32: 4 * 2**-24, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=0)


def test_weight_is_multiplied_before_the_rounding() -> None:
    """Rounding first would double the error; here it is visible in many places of bf16."""
    x, weight = torch.randn(8, 512).bfloat16(), 1 + 0.3 * torch.rand(512)
    normed = x.float() * x.float().square().mean(-1, keepdim=True).rsqrt()
    assert torch.equal(rms_norm(x, weight, eps=1e-20), (normed * weight).bfloat16())
    assert not torch.equal(rms_norm(x, weight, eps=1e-20), (normed.bfloat16() * weight).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_zero_row_gives_zeros(dtype: torch.dtype) -> None:
    x = torch.randn(3, 64).to(dtype)
    x[1] = 0
    normed = rms_norm(x, torch.ones(64), eps=1e-20)
    assert (normed[1] == 0).all()
    assert (normed[0] != 0).all()
