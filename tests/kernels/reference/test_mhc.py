"""Hyper-connections: the golden unit, a literal loop, and what Sinkhorn does and does not give."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from leadline.kernels import ops
from leadline.kernels.reference import mhc, norm, quant
from leadline.weights.load import CheckpointSource
from tests.kernels.bounds import Bounded

EPS, HC_EPS, ROUNDS = 1e-20, 1e-6, 20
SUM = 2.0**-20  # error of five terms in float32, of the root of their squares


def coefficients(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return mhc.mhc_coefficients(
        streams, fn, base, scale, sinkhorn_iters=ROUNDS, hc_eps=HC_EPS, eps=EPS
    )


def literal(
    row: Tensor, fn: Tensor, base: Tensor, scale: Tensor
) -> tuple[list[float], list[float], list[list[float]]]:
    """2.3 for the streams ``[S, D]`` of one row, number by number."""
    size = row.shape[0]
    span = range(size)
    z = row.flatten()
    factor = 1 / math.sqrt(float(z.square().mean()) + EPS)
    mixed = [float(f @ z) * factor for f in fn]
    which = [0] * size + [1] * size + [2] * size * size
    g = [mixed[n] * float(scale[which[n]]) + float(base[n]) for n in range(len(which))]
    pre = [1 / (1 + math.exp(-g[s])) + HC_EPS for s in span]
    post = [2 / (1 + math.exp(-g[size + s])) for s in span]
    comb = [[math.exp(g[2 * size + size * i + o]) for o in span] for i in span]
    comb = [[c / sum(line) + HC_EPS for c in line] for line in comb]
    for rounds in range(ROUNDS):
        if rounds:
            comb = [[c / (sum(line) + HC_EPS) for c in line] for line in comb]
        columns = [sum(comb[i][o] for i in span) + HC_EPS for o in span]
        comb = [[comb[i][o] / columns[o] for o in span] for i in span]
    return pre, post, comb


@pytest.fixture
def site() -> tuple[Tensor, Tensor, Tensor]:
    """``fn``, ``base`` and ``scale`` of three streams of five channels, float64."""
    return torch.randn(15, 15).double(), torch.randn(15).double(), torch.randn(3).double()


def test_golden_coefficients(units: dict[str, Tensor], weights: CheckpointSource) -> None:
    parts = ("fn", "base", "scale")
    site = [weights.tensor(f"layers.4.hc_attn_{part}", torch.float32) for part in parts]
    pre, post, comb = coefficients(units["unit.mhc.streams"], *site)
    mix = torch.cat((pre, post, comb.flatten(1)), dim=1)
    torch.testing.assert_close(mix, units["unit.mhc.mix"], rtol=1e-5, atol=1e-6)


def test_coefficients_equal_the_literal_loop(site: tuple[Tensor, Tensor, Tensor]) -> None:
    streams = torch.randn(4, 3, 5).double() * 100
    got = coefficients(streams, *site)
    for row in range(4):
        for value, wanted in zip(got, literal(streams[row], *site), strict=True):
            wanted_tensor = torch.tensor(wanted, dtype=torch.float64)
            torch.testing.assert_close(value[row], wanted_tensor, rtol=1e-12, atol=1e-14)


def test_columns_sum_to_one_and_rows_need_not(site: tuple[Tensor, Tensor, Tensor]) -> None:
    """The last step is one over columns; v41-model 9.3 says not to mend the rows."""
    fn, base, scale = site
    _, _, comb = coefficients(torch.randn(50, 3, 5).double(), 20 * fn, base, scale)
    torch.testing.assert_close(comb.sum(1), torch.ones(50, 3).double(), rtol=0, atol=1e-5)
    assert (comb.sum(2) - 1).abs().max() > 1e-3
    assert (comb > 0).all()


def test_statistic_runs_over_all_streams(site: tuple[Tensor, Tensor, Tensor]) -> None:
    """Scaling all streams changes nothing, scaling one of them does."""
    streams = torch.randn(1, 3, 5).double()
    pre, _, _ = coefficients(streams, *site)
    scaled, _, _ = coefficients(streams * 1e4, *site)
    torch.testing.assert_close(scaled, pre, rtol=1e-12, atol=0)
    streams[:, 1] *= 1e4
    other, _, _ = coefficients(streams, *site)
    assert (other - pre).abs().max() > 1e-3


def test_zero_streams_give_the_base(site: tuple[Tensor, Tensor, Tensor]) -> None:
    fn, base, scale = site
    pre, post, comb = coefficients(torch.zeros(1, 3, 5).double(), fn, base, scale)
    torch.testing.assert_close(pre[0], base[:3].sigmoid() + HC_EPS)
    torch.testing.assert_close(post[0], 2 * base[3:6].sigmoid())
    assert comb.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_coefficients_stay_wide(dtype: torch.dtype, site: tuple[Tensor, Tensor, Tensor]) -> None:
    fn, base, scale = (part.float() for part in site)
    for part in coefficients(torch.randn(2, 3, 5).to(dtype), fn, base, scale):
        assert part.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
class TestMixing:
    """One rounding to the dtype of the streams, at the end."""

    @staticmethod
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        streams, y = torch.randn(6, 4, 32).to(dtype), torch.randn(6, 32).to(dtype)
        return streams, y, torch.rand(6, 4).to(wide), torch.rand(6, 4, 4).to(wide)

    def test_collapse_is_a_weighted_sum(self, dtype: torch.dtype) -> None:
        streams, _, mix, _ = self.make(dtype)
        got = mhc.mhc_collapse(streams, mix)
        assert got.dtype is dtype
        exact = Bounded.exactly(mix).product(streams.double().transpose(1, 2), SUM)
        assert exact.rounded(lambda x: x.to(dtype)).contains(got)

    def test_expand_sums_over_the_incoming_stream(self, dtype: torch.dtype) -> None:
        streams, y, post, comb = self.make(dtype)
        got = mhc.mhc_expand(y, streams, post, comb)
        assert got.dtype is dtype
        for o in range(4):
            factors = torch.cat((post[:, [o]], comb[:, :, o]), dim=1)
            terms = torch.cat((y.unsqueeze(1), streams), dim=1).double()
            exact = Bounded.exactly(factors).product(terms.transpose(1, 2), SUM)
            assert exact.rounded(lambda x: x.to(dtype)).contains(got[:, o])

    def test_one_hot_mix_copies_a_stream(self, dtype: torch.dtype) -> None:
        streams, _, mix, _ = self.make(dtype)
        mix = torch.zeros_like(mix)
        mix[:, 2] = 1
        assert torch.equal(mhc.mhc_collapse(streams, mix), streams[:, 2])

    def test_seam_rounds_after_each_of_its_steps(self, dtype: torch.dtype) -> None:
        streams, y, post, comb = self.make(dtype)
        mix, weight = post.flip(1), torch.rand(32).to(post.dtype)
        expanded, u = ops.mhc_seam(y, streams, post, comb, mix, weight, eps=EPS)
        assert torch.equal(expanded, mhc.mhc_expand(y, streams, post, comb))
        row = mhc.mhc_collapse(expanded, mix)
        assert row.dtype is dtype
        assert torch.equal(u, norm.rms_norm(row, weight, eps=EPS))

    def test_seam_gives_more_on_demand(self, dtype: torch.dtype) -> None:
        streams, y, post, comb = self.make(dtype)
        mix, weight = post.flip(1), torch.rand(32).to(post.dtype)
        fp8 = torch.empty(6, 32, dtype=torch.uint8), torch.empty(6, 1, dtype=torch.uint8)
        mean = torch.empty(6, 32, dtype=dtype)
        expanded, u = ops.mhc_seam(
            *(y, streams, post, comb, mix, weight), eps=EPS, fp8=fp8, mean=mean
        )
        exact = expanded.double().mean(1).to(dtype)
        torch.testing.assert_close(mean, exact, rtol=1e-6, atol=1e-6)
        for actual, wanted in zip(fp8, quant.quantize_fp8_32(u), strict=True):
            assert torch.equal(actual, wanted)


class TestHead:
    """v4-model 2.2."""

    def test_equals_the_formula(self) -> None:
        streams, fn = torch.randn(2, 3, 5).double(), torch.randn(3, 15).double()
        base, scale = torch.randn(3).double(), torch.randn(1).double()
        got = ops.mhc_head(streams, fn, base, scale, hc_eps=HC_EPS, eps=EPS)
        for row, weights in zip(streams, got, strict=True):
            z = row.flatten()
            factor = 1 / math.sqrt(float(z.square().mean()) + EPS)
            for f, b, weight in zip(fn, base, weights, strict=True):
                gate = float(f @ z) * factor * float(scale) + float(b)
                assert math.isclose(weight, 1 / (1 + math.exp(-gate)) + HC_EPS, rel_tol=1e-12)

    def test_a_scale_of_zero_fixes_the_weights(self) -> None:
        base = torch.randn(4)
        weights = ops.mhc_head(
            torch.randn(6, 4, 8), torch.randn(4, 32), base, torch.zeros(1), hc_eps=0.5, eps=EPS
        )
        torch.testing.assert_close(weights, (base.sigmoid() + 0.5).expand(6, -1))
