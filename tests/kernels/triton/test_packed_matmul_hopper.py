"""Hopper's products with FP8 weights; without a Hopper GPU, all that surrounds the kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.kernels import batch_invariance
from leadline.kernels.packed import PackedWeight
from leadline.kernels.reference import quant as reference_quant
from leadline.kernels.triton import (
    grouped_linear,
    linear,
    packed_matmul,
    packed_matmul_hopper,
    shared_expert,
)
from leadline.kernels.triton.arrangement import Arranged, arrange
from tests.kernels.triton.test_linear import (
    LIMIT,
    assert_product,
    assert_projection,
    assert_shared_expert,
    packed,
    tokens,
)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def on_a_gpu(*counts: int) -> list[Any]:
    """Numbers of tokens that make a difference to the kernel itself."""
    return [pytest.param(count, marks=pytest.mark.gpu) for count in counts]


def natural(x: Arranged, groups: int) -> Tensor:
    """``[m, G, in]`` in the order of channels."""
    count = x.values.shape[1]
    blocks = x.values.reshape(groups, -1, count, 4, 2, 4, 2).transpose(3, 5)
    return blocks.permute(2, 0, 1, 3, 4, 5, 6).reshape(count, groups, -1)


def multiply(x: Arranged, weight: PackedWeight) -> Tensor:
    """What the kernel does, in two parts."""
    values = natural(x, len(weight.codes)).float()
    halves = torch.arange(values.shape[-1], device=values.device) % 2 == torch.tensor([[0], [1]])
    dense = dataclasses.replace(weight, dtype=torch.float32).dense
    return torch.stack([torch.einsum("mgi,goi->mgo", values * half, dense) for half in halves])


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel for any number of tokens, or what stands for it."""
    monkeypatch.setattr(packed_matmul, "_has_fp8_tensor_cores", lambda: False)
    if not HOPPER:
        monkeypatch.setattr(packed_matmul, "_suits_hopper", lambda *operands: True)
        monkeypatch.setattr(packed_matmul_hopper, "multiply", multiply)


@pytest.mark.parametrize("rounds", [True, False], ids=["rounded", "as it is"])
@pytest.mark.parametrize("width", [64, 1280])
def test_arranging_changes_the_order_only(device: torch.device, width: int, rounds: bool) -> None:
    """Two of three groups, rows with padding between them."""
    weight = packed(2, 32, width, device=device, quantizes_input=rounds)
    x = tokens(5, 3, width + 32, device=device)[:, 1:, :width]
    wanted = reference_quant.round_trip_fp8_32(x.contiguous()) if rounds else x
    assert torch.equal(natural(arrange(x, weight), 2), wanted)


@pytest.mark.parametrize("count", [1, 12, *on_a_gpu(16, 17, 64, 65, 128, 300)])
@pytest.mark.parametrize("shape", [(1, 33, 128), (1, 300, 384), (3, 96, 256)], ids=str)
def test_any_shape(device: torch.device, count: int, shape: tuple[int, int, int]) -> None:
    rounds = shape[0] == 1
    weight = packed(*shape, device=device, quantizes_input=rounds)
    x = tokens(count, shape[0], shape[2], device=device)
    actual = packed_matmul.packed_matmul(x, weight).unflatten(1, (shape[0], -1))
    assert_product(actual, x, weight)


@pytest.mark.parametrize("count", [4, *on_a_gpu(32, 64, 128)])
def test_weights_are_exact(device: torch.device, count: int) -> None:
    """The identity as input gives the weights: all codes, at scales from tiny to absurd."""
    row = torch.arange(256, device=device, dtype=torch.uint8)
    codes = row.unsqueeze(1).expand(-1, 128).clone()
    codes[codes & 0x7F == 0x7F] = 0
    scales = torch.tensor([30, 60, 105, 113, 127, 140, 150, 154], dtype=torch.uint8, device=device)
    weight = packed(256, 128, device=device, quantizes_input=False)
    weight = dataclasses.replace(weight, codes=codes, scales=scales[torch.randint(8, (8, 4))])
    x = torch.eye(128, device=device, dtype=torch.bfloat16)[:count]
    assert torch.equal(linear.linear(x, weight), weight.dense.T[:count])


def test_zero_tiles_may_have_any_scale(device: torch.device) -> None:
    x, weight = tokens(3, 128, device=device), packed(64, 128, device=device)
    weight.scales[0] = torch.tensor([0, 254, 120, 160])
    weight.codes[:32, 32:64] = 0
    weight.codes[:32, 96:] = 0
    assert_product(linear.linear(x, weight), x, weight)


@pytest.mark.parametrize("count", [5, *on_a_gpu(70)])
def test_broken_rows_stay_alone(device: torch.device, count: int) -> None:
    x, weight = tokens(count, 128, device=device), packed(64, 128, device=device)
    wanted = linear.linear(x, weight)
    x[0], x[2, 3] = torch.nan, torch.inf
    actual = linear.linear(x, weight)
    assert torch.equal(actual[[1, 3, 4]], wanted[[1, 3, 4]])
    assert not actual[[0, 2]].isfinite().any()


def test_output_projection(device: torch.device) -> None:
    """The first product ends with what the second one takes."""
    wo_a = packed(2, 64, 128, device=device, quantizes_input=False)
    wo_b = packed(96, 128, device=device)
    x = tokens(12, 4, 64, device=device)
    z = grouped_linear.grouped_linear(x.reshape(12, 2, 128), wo_a).flatten(1)
    actual = grouped_linear.output_projection(x, wo_a, wo_b)
    assert torch.equal(actual, linear.linear(z, wo_b))
    assert_projection(actual, x, wo_a, wo_b)


def test_shared_expert(device: torch.device) -> None:
    w13, w2 = packed(256, 128, device=device), packed(96, 128, device=device)
    w13.scales.sub_(4)  # or SwiGLU would clamp nearly every product
    x = tokens(12, 128, device=device)
    actual = shared_expert.shared_expert(x, w13, w2, limit=LIMIT)
    assert_shared_expert(actual, x, w13, w2)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
def test_rows_alone_and_together(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariance.switch, "enabled", True)
    x, weight = tokens(200, 1280, device=device), packed(512, 1280, device=device)
    together = linear.linear(x, weight)
    for rows in (slice(40, 41), slice(50, 80)):
        assert torch.equal(linear.linear(x[rows], weight), together[rows])
