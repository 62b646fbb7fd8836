"""Few tokens that each program encodes for itself give the bits of those encoded before."""

from __future__ import annotations

import dataclasses
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.kernels.packed import PackedWeight, align_scales
from leadline.kernels.triton import packed_matmul, streamed_matmul
from leadline.kernels.triton.operand import encode
from tests.kernels.triton.test_linear import packed, packed_128, tokens


def assert_same(x: Tensor, weight: PackedWeight) -> Tensor:
    """Of both ways; returns the product's parts."""
    actual = streamed_matmul.streamed_matmul(x, weight)
    wanted = streamed_matmul.streamed_matmul(encode(x, weight), weight)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
    return actual


def make(*shape: int, device: torch.device, quantizes_input: bool, aligned: bool) -> PackedWeight:
    weight = packed(*shape, device=device, quantizes_input=quantizes_input)
    if aligned:
        weight = align_scales(weight)
        assert weight.aligned
    return weight


@pytest.mark.parametrize("aligned", [False, True], ids=["plain", "aligned"])
@pytest.mark.parametrize("quantizes_input", [True, False], ids=["rounded", "as it is"])
@pytest.mark.parametrize("count", [1, 3, 8, 40])
def test_any_number_of_tokens(
    device: torch.device, count: int, quantizes_input: bool, aligned: bool
) -> None:
    """40 tokens with two terms are more than a block of lines holds."""
    weight = make(1, 32, 288, device=device, quantizes_input=quantizes_input, aligned=aligned)
    assert_same(tokens(count, 1, 288, device=device), weight)


@pytest.mark.parametrize(("width", "processors"), [(32, 132), (416, 1), (416, 2), (512, 132)])
@pytest.mark.parametrize("quantizes_input", [True, False], ids=["rounded", "as it is"])
@pytest.mark.parametrize("aligned", [False, True], ids=["plain", "aligned"])
def test_any_width_and_cut_of_it(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    aligned: bool,
    quantizes_input: bool,
    width: int,
    processors: int,
) -> None:
    """One processor takes short steps, two take all of the long ones, many cut the width.

    Rows are the first of more channels, and lie apart.
    """
    monkeypatch.setattr(streamed_matmul, "processors", lambda device: processors)
    shape = 2, 96, width
    weight = make(*shape, device=device, quantizes_input=quantizes_input, aligned=aligned)
    x = tokens(3, 4, width + 48, device=device)[:, 1:3, :width]
    parts = assert_same(x, weight)
    assert (len(parts) > 1) == (width == 512)


@pytest.mark.parametrize("count", [1, 5])
def test_input_blocks_of_128(device: torch.device, count: int) -> None:
    """For weights of either kind, the last block partial."""
    weight = packed_128(1, 80, 416, device=device)
    x = tokens(count, 1, 416, device=device)
    x *= 2.0 ** torch.randint(-12, 12, (416,), device=device)
    assert_same(x, weight)
    assert_same(x, dataclasses.replace(weight, aligned=False))


@pytest.mark.parametrize("aligned", [False, True], ids=["plain", "aligned"])
@pytest.mark.parametrize("quantizes_input", [True, False], ids=["rounded", "as it is"])
def test_broken_and_extreme_rows(
    device: torch.device, quantizes_input: bool, aligned: bool
) -> None:
    shape = 1, 32, 320
    weight = make(*shape, device=device, quantizes_input=quantizes_input, aligned=aligned)
    x = tokens(7, 1, 320, device=device)
    wanted = assert_same(x, weight)
    x[0], x[2, 0, 3], x[4, 0, 300] = torch.nan, torch.inf, -torch.inf
    x[5] = 0
    actual = assert_same(x, weight)
    assert torch.equal(actual[:, [1, 3, 6]], wanted[:, [1, 3, 6]])
    assert not actual.sum(0)[[0, 2, 4]].isfinite().any()
    assert not actual[:, 5].any()
    for power in (-133, 110):
        assert_same((tokens(2, 1, 320, device=device) * 2.0**power).bfloat16(), weight)


@pytest.mark.parametrize(("count", "rows"), [(1, 64), (4, 64), (5, 64), (1, 256)])
def test_products_of_one_wave_encode_few_tokens_so(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, count: int, rows: int
) -> None:
    """Channels that lie apart are made adjacent first."""
    spy = MagicMock(wraps=encode)
    monkeypatch.setattr(packed_matmul, "encode", spy)
    monkeypatch.setattr(streamed_matmul, "processors", lambda device: 1)
    weight = make(1, rows, 128, device=device, quantizes_input=True, aligned=True)
    x = tokens(count, 1, 256, device=device)[..., ::2]
    actual = packed_matmul.packed_matmul(x, weight)
    assert torch.equal(actual, packed_matmul.packed_matmul(x.contiguous(), weight))
    assert spy.called == (count == 5 or rows == 256)
