"""Engram: hashes in Python integers, the gate at its odd places."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from leadline.kernels.reference.engram import engram_hash, engram_inject

EPS = 1e-20


def test_hash_equals_python_integers() -> None:
    """Two layers, orders 2 to 4, three heads, multipliers at the upper end of what B allows."""
    classes = 99092
    bound = 2 * ((2**63 - 1) // classes // 2) + 1
    multipliers = torch.tensor([[bound - 2, 3, bound - 4, 12345], [1, bound - 6, 7, bound - 8]])
    primes = torch.randint(16_000_000, 17_000_000, (2, 9))
    offsets = primes.cumsum(1) - primes
    history = torch.randint(0, classes, (6, 4))
    history[0] = classes - 1  # the largest products
    rows = engram_hash(history, multipliers, primes, offsets)
    for m, t in enumerate(history.tolist()):
        for layer, factors in enumerate(multipliers.tolist()):
            mixed = t[0] * factors[0]
            for order in (1, 2, 3):
                mixed ^= t[order] * factors[order]
                assert mixed < 2**63
                for head in range(3):
                    column = 3 * (order - 1) + head
                    wanted = mixed % int(primes[layer, column]) + int(offsets[layer, column])
                    assert rows[m, layer, column] == wanted


def unit_rows(dot: float, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Streams ``[1, 2, 16]`` and kv whose normalised dot product is ``dot`` in both streams.

    Both vectors have a mean square of 1: dot = sum(h k) / sqrt(16).
    """
    hidden = torch.ones(1, 2, 16, dtype=dtype)
    cosine = dot / 4
    key = torch.full((16,), cosine, dtype=dtype)
    key += math.sqrt(1 - cosine * cosine) * torch.tensor([1.0, -1.0], dtype=dtype).repeat(8)
    value = torch.arange(1, 17, dtype=dtype)
    return hidden, torch.cat((key, key, value)).unsqueeze(0)


def inject(streams: Tensor, kv: Tensor, live: bool = True) -> Tensor:
    ones = torch.ones(streams.shape[1:], dtype=streams.dtype)
    return engram_inject(streams, kv, ones, ones, torch.tensor([live]), eps=EPS)


class TestGate:
    @pytest.mark.parametrize("dot", [-4.0, -1.0, -1e-3, 1e-3, 1.0, 4.0])
    def test_is_the_sigmoid_of_the_signed_root(self, dot: float) -> None:
        streams, kv = unit_rows(dot)
        root = math.copysign(math.sqrt(abs(dot)), dot)
        added = inject(streams, kv) - streams
        gate = 1 / (1 + math.exp(-root))
        torch.testing.assert_close(added[0, 0], gate * kv[0, -16:], rtol=1e-9, atol=0)

    @pytest.mark.parametrize("dot", [1e-7, -1e-7])
    def test_root_has_a_floor_that_keeps_the_sign(self, dot: float) -> None:
        streams, kv = unit_rows(dot)
        added = inject(streams, kv) - streams
        gate = 1 / (1 + math.exp(-math.copysign(1e-3, dot)))
        torch.testing.assert_close(added[0, 0], gate * kv[0, -16:], rtol=1e-9, atol=0)

    @pytest.mark.parametrize("zero", ["streams", "key"])
    def test_zero_dot_is_about_half_open(self, zero: str) -> None:
        """Also with a vector of zeros, whose statistic is 1 / sqrt(eps): no NaN."""
        streams, kv = unit_rows(0.0)
        if zero == "streams":
            streams = torch.zeros_like(streams)
        else:
            kv[:, :32] = 0
        gate = (inject(streams, kv) - streams)[0, 0] / kv[0, -16:]
        ajar = 1 / (1 + math.exp(-1e-3)) - 0.5  # to one side or the other: zero has a sign
        torch.testing.assert_close((gate - 0.5).abs(), torch.full((16,), ajar).double())

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_huge_dots_saturate(self, dtype: torch.dtype, sign: int) -> None:
        """Weights of 100 on both sides: dots of 4e4, the gate fully open or shut."""
        streams, kv = unit_rows(4.0 * sign)
        weight = torch.full((2, 16), 100.0)
        got = engram_inject(
            streams.to(dtype), kv.to(dtype), weight, weight, torch.tensor([True]), eps=EPS
        )
        wanted = streams + (sign > 0) * kv[:, -16:].unsqueeze(1)
        torch.testing.assert_close(got, wanted.to(dtype), rtol=0, atol=1e-6)

    def test_magnitudes_cancel(self) -> None:
        """Both vectors are normalised: a row 1e4 times larger has the same gate."""
        streams, kv = unit_rows(1.0)
        kv[:, :32] *= 1e4
        added = inject(streams * 1e4, kv) - streams * 1e4
        gate = 1 / (1 + math.exp(-1))
        torch.testing.assert_close(added[0, 0], gate * kv[0, -16:], rtol=1e-9, atol=0)


def test_streams_have_their_own_statistics() -> None:
    streams, kv = torch.randn(3, 2, 16).double(), torch.randn(3, 48).double()
    q_weight, k_weight = torch.randn(2, 2, 16).double()
    live = torch.tensor([True, True, True])
    got = engram_inject(streams, kv, q_weight, k_weight, live, eps=EPS)
    for row in range(3):
        for s in range(2):
            h, key = streams[row, s], kv[row, 16 * s : 16 * s + 16]
            dot = float((h * q_weight[s] * k_weight[s] * key).sum())
            dot /= math.sqrt(float(h.square().mean()) * float(key.square().mean()) * 16)
            root = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)
            wanted = h + kv[row, 32:] / (1 + math.exp(-root))
            torch.testing.assert_close(got[row, s], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dead_rows_are_untouched_bit_for_bit(dtype: torch.dtype) -> None:
    streams, kv = torch.randn(4, 2, 16).to(dtype), torch.randn(4, 48).to(dtype)
    live = torch.tensor([True, False, True, False])
    ones = torch.ones(2, 16)
    got = engram_inject(streams, kv, ones, ones, live, eps=EPS)
    assert torch.equal(got[~live], streams[~live])
    assert (got[live] != streams[live]).any(-1).all()
