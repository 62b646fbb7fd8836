"""Fake quantisation with a straight-through gradient, elementwise so that compilers fuse it.

The values are those of the engine's quantisers (``kernels.reference.quant``), but for the sign of
zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.kernels.reference.quant import E2M1_MAX, E4M3_MAX

_EXPONENT = 0x7F800000  # of a float32, as bits


def fake_fp8_32(x: Tensor) -> Tensor:
    """FQ8_32 and MXFP8: E4M3 under a power of two per 32 channels (v41-model 4.2, 7.3)."""
    blocks = x.float().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = _ceil_power_of_two(amax * (1 / E4M3_MAX))
    return _straight_through(x, _round_e4m3(blocks / scale) * scale)


def fake_fp4_16(x: Tensor) -> Tensor:
    """FQ4_16: E2M1 under an E4M3 scale per 16 channels (v41-model 4.1)."""
    blocks = x.float().unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = _round_e4m3(amax.clamp(min=E2M1_MAX * 2.0**-9) / E2M1_MAX)
    return _straight_through(x, _round_e2m1(blocks / scale) * scale)


def fake_fp4_32(x: Tensor) -> Tensor:
    """FQ4_32 (MXFP4): E2M1 under a power of two per 32 channels (v41-model 4.3)."""
    blocks = x.float().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=E2M1_MAX * 2.0**-126)
    scale = _ceil_power_of_two(amax * (1 / E2M1_MAX))
    return _straight_through(x, _round_e2m1(blocks / scale) * scale)


def _straight_through(x: Tensor, blocks: Tensor) -> Tensor:
    # x - x is an exact zero, so the value is that of the blocks and the gradient that of x.
    return blocks.flatten(-2).to(x.dtype).detach() + (x - x.detach())


def _ceil_power_of_two(x: Tensor) -> Tensor:
    bits = x.view(torch.int32) + 0x7FFFFF  # carries unless the mantissa is 0
    return (bits & _EXPONENT).view(torch.float32)


def _round_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _round_e2m1(x: Tensor) -> Tensor:
    # The grid is even within each octave, so ties to even codes are ties to even multiples.
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (x / step).round() * step
