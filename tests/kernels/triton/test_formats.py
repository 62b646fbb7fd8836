"""Formats inside kernels give the bytes of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from leadline.kernels.reference import quant
from leadline.kernels.triton import formats


@triton.jit
def _encode(x, bf16, e4m3, e2m1, fp8_scale, fp4_scale, fp4_16_scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(bf16 + at, formats.to_bf16(value))
    tl.store(e4m3 + at, formats.encode_e4m3(value))
    tl.store(e2m1 + at, formats.encode_e2m1(value).to(tl.uint8))
    tl.store(fp8_scale + at, formats.fp8_scale(tl.abs(value)).to(tl.uint8))
    tl.store(fp4_scale + at, formats.fp4_32_scale(tl.abs(value)).to(tl.uint8))
    tl.store(fp4_16_scale + at, formats.fp4_16_scale(tl.abs(value)))


@triton.jit
def _decode(codes, e4m3, e2m1, ue8m0, inverse, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    code = tl.load(codes + at)
    tl.store(e4m3 + at, formats.decode_e4m3(code))
    tl.store(e2m1 + at, formats.decode_e2m1(code))
    tl.store(ue8m0 + at, formats.decode_ue8m0(code))
    tl.store(inverse + at, formats.reciprocal_of_scale(code))


@triton.jit
def _round(x, e2m1, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(e2m1 + at, formats.round_e2m1(tl.load(x + at)))


def _values() -> Tensor:
    """Every E4M3 and E2M1 value, all ties between neighbours, what lies beside them, and noise."""
    codes = quant.decode_e4m3(torch.arange(127, dtype=torch.uint8))
    grid = torch.cat((codes, torch.tensor([480.0, 512.0, 1e30])))
    ties = (grid[1:] + grid[:-1]) / 2
    exact = torch.cat((grid, ties, 1.25 * codes, ties * 2**-4))
    near = torch.cat((exact, exact.nextafter(exact + 1), exact.nextafter(exact - 1)))
    noise = torch.randn(3000) * 2.0 ** torch.randint(-140, 120, (3000,))
    extreme = torch.tensor([0.0, 1e-45, 1.2e-38, 3.4e38])
    positive = torch.cat((near, noise, extreme))
    both = torch.cat((positive, -positive, torch.tensor([torch.inf, -torch.inf, torch.nan])))
    return torch.nn.functional.pad(both, (0, -len(both) % 1024), value=1.0)


def test_rounding_gives_the_values_of_codes(device: torch.device) -> None:
    x = _values().to(device)
    rounded = torch.empty_like(x)
    _round[(len(x) // 1024,)](x, rounded, 1024, enable_fp_fusion=False)
    wanted = quant.decode_e2m1(quant.encode_e2m1(x.clamp(-6, 6)))
    wanted = torch.where(x.isnan(), torch.nan, wanted.view(x.shape))
    torch.testing.assert_close(rounded, wanted, rtol=0, atol=0, equal_nan=True)


def test_encoders_give_the_reference_s_codes(device: torch.device) -> None:
    x = _values().to(device)
    outputs = [torch.empty(len(x), dtype=torch.uint8, device=device) for _ in range(5)]
    bf16 = torch.empty(len(x), dtype=torch.bfloat16, device=device)
    _encode[(len(x) // 1024,)](x, bf16, *outputs, 1024)
    torch.testing.assert_close(bf16, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    e4m3, e2m1, fp8_scale, fp4_scale, fp4_16_scale = outputs
    number = ~x.isnan()
    assert torch.equal(e4m3[number], quant.encode_e4m3(x)[number])
    assert bool((e4m3[~number] & 0x7F == 0x7F).all())
    pairs = quant.encode_e2m1(x.clamp(-6, 6))
    wanted = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten()
    assert torch.equal(e2m1[number], wanted[number])
    in_blocks = x.unsqueeze(1).expand(-1, 32)
    assert torch.equal(fp8_scale, quant.quantize_fp8_32(in_blocks)[1].squeeze(1))
    assert torch.equal(fp4_scale, quant.quantize_fp4_32(in_blocks)[1].squeeze(1))
    wanted = quant.quantize_fp4_16(in_blocks[:, :16])[1].squeeze(1)
    assert torch.equal(fp4_16_scale & 0x7F, wanted & 0x7F)


def test_decoders_give_the_reference_s_values(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    e4m3, e2m1, ue8m0, inverse = torch.empty(4, 256, device=device)
    _decode[(1,)](codes, e4m3, e2m1, ue8m0, inverse, 256)
    numbers = codes & 0x7F != 0x7F
    assert torch.equal(e4m3[numbers], quant.decode_e4m3(codes)[numbers])
    assert torch.equal(e2m1[:16], quant.decode_e2m1(codes[:16])[0::2])
    scales = quant.decode_ue8m0(codes)
    torch.testing.assert_close(ue8m0, scales, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(inverse[1:254], 1 / scales[1:254], rtol=0, atol=0)
