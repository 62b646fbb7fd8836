"""Experts: a loop over tokens in plain Python, with the rounding points of bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leadline.kernels.packed import LinearWeight, WeightFormat
from leadline.kernels.reference import experts as e
from leadline.kernels.reference.quant import round_trip_fp8_32, round_trip_fp8_row

D, F, E, K = 64, 32, 5, 2
LIMIT = 1.5
FORMATS = {"plain": WeightFormat.PLAIN, "packed": WeightFormat.MXFP4}


def make_weights(
    format: WeightFormat, dtype: torch.dtype, *, stack: int | None = None
) -> tuple[LinearWeight, LinearWeight]:
    lead = () if stack is None else (stack,)
    w13 = torch.randn(*lead, 2 * F, D).bfloat16().to(dtype) / 4
    w2 = torch.randn(*lead, D, F).bfloat16().to(dtype) / 4
    return LinearWeight(w13, format), LinearWeight(w2, format)


def one_expert(x: Tensor, w13: Tensor, w2: Tensor, weight: float, packed: bool) -> Tensor:
    """5.3 for one token ``[D]``, rounding where 4.5 says; ``weight`` is the router's."""
    dtype = x.dtype

    def product(row: Tensor, matrix: Tensor) -> Tensor:
        row = round_trip_fp8_32(row) if packed else row
        return (row.double() @ matrix.double().T).to(dtype)

    gate, up = product(x, w13[:F]).double(), product(x, w13[F:]).double()
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    hidden = gate * gate.sigmoid() * up * weight
    return product(hidden.to(dtype), w2).double()


def routing(rows: int) -> tuple[Tensor, Tensor]:
    """Expert 3 is never chosen, expert 0 often."""
    ids = torch.tensor([[0, 1], [0, 4], [1, 2], [0, 2], [2, 4], [0, 1], [0, 4]])[:rows]
    return ids, torch.rand(rows, K) + 0.1


def loop(x: Tensor, ids: Tensor, weights: Tensor, w13: LinearWeight, w2: LinearWeight) -> Tensor:
    """Every token's experts, one after the other, summed in float64: ``[m, D]``."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    for row, chosen in enumerate(ids.tolist()):
        for slot, i in enumerate(chosen):
            total[row] += one_expert(
                x[row], w13.dense[i], w2.dense[i], float(weights[row, slot]), w13.quantizes_input
            )
    return total


@pytest.mark.parametrize("format", FORMATS)
class TestRouted:
    @pytest.mark.parametrize("rows", [1, 7])
    def test_float64_equals_a_loop_over_tokens(self, format: str, rows: int) -> None:
        x = torch.randn(rows, D).double()
        w13, w2 = make_weights(FORMATS[format], torch.float64, stack=E)
        ids, weights = routing(rows)
        got = e.routed_experts(x, ids, weights.double(), w13, w2, limit=LIMIT)
        torch.testing.assert_close(got, loop(x, ids, weights, w13, w2), rtol=0, atol=1e-12)

    def test_bfloat16_rounds_where_the_loop_does(self, format: str) -> None:
        """A sum on the border of two bf16 values may fall either way; an 8-bit code may follow."""
        x = torch.randn(7, D).bfloat16()
        w13, w2 = make_weights(FORMATS[format], torch.float32, stack=E)
        ids, weights = routing(7)
        got = e.routed_experts(x, ids, weights, w13, w2, limit=LIMIT)
        wanted = loop(x, ids, weights, w13, w2).float()
        assert got.dtype is torch.float32
        assert (got == wanted).float().mean() > 0.95
        torch.testing.assert_close(got, wanted, rtol=2**-6, atol=2**-6)

    def test_rows_do_not_see_their_neighbours(self, format: str) -> None:
        x = torch.randn(7, D).double()
        w13, w2 = make_weights(FORMATS[format], torch.float64, stack=E)
        ids, weights = routing(7)
        together = e.routed_experts(x, ids, weights, w13, w2, limit=LIMIT)
        for row in range(7):
            part = slice(row, row + 1)
            alone = e.routed_experts(x[part], ids[part], weights[part], w13, w2, limit=LIMIT)
            torch.testing.assert_close(together[part], alone, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
    def test_shared_expert_is_one_expert_of_weight_one(
        self, format: str, dtype: torch.dtype
    ) -> None:
        x = torch.randn(5, D).to(dtype)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        w13, w2 = make_weights(FORMATS[format], wide)
        got = e.shared_expert(x, w13, w2, limit=LIMIT)
        wanted = torch.stack(
            [one_expert(row, w13.dense, w2.dense, 1.0, w13.quantizes_input) for row in x]
        )
        assert got.dtype is dtype
        tolerance = 1e-12 if dtype is torch.float64 else 2**-6
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def test_weight_counts_before_the_rounding() -> None:
    """Outputs scaled afterwards would differ by a rounding in bf16."""
    x = torch.randn(7, D).bfloat16()
    w13, w2 = make_weights(WeightFormat.PLAIN, torch.float32, stack=E)
    ids, weights = routing(7)
    inside = e.routed_experts(x, ids, weights, w13, w2, limit=LIMIT)
    ones = torch.ones(7, 1)
    outside = sum(
        weights[:, [slot]] * e.routed_experts(x, ids[:, [slot]], ones, w13, w2, limit=LIMIT)
        for slot in range(K)
    )
    assert isinstance(outside, Tensor)
    torch.testing.assert_close(inside, outside, rtol=2**-5, atol=2**-5)
    assert not torch.equal(inside, outside)


@pytest.mark.parametrize("format", FORMATS)
def test_row_scales_round_inputs_of_packed_weights(format: str) -> None:
    x = torch.randn(7, D).double()
    w13, w2 = make_weights(FORMATS[format], torch.float64, stack=E)
    x[:, 32:] *= 2.0**-14  # a block that has another scale than its row, and counts as much
    w13.dense[:, :, 32:] *= 2.0**14
    ids, weights = routing(7)
    got = e.routed_experts(x, ids, weights.double(), w13, w2, limit=LIMIT, row_scales=True)
    wanted = torch.zeros_like(x)
    for row, chosen in enumerate(ids.tolist()):
        for slot, i in enumerate(chosen):
            inner = round_trip_fp8_row(x[row]) if w13.quantizes_input else x[row]
            hidden = e.swiglu(w13.dense[i] @ inner, limit=LIMIT) * weights[row, slot].double()
            inner = round_trip_fp8_row(hidden) if w2.quantizes_input else hidden
            wanted[row] += w2.dense[i] @ inner
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    finer = e.routed_experts(x, ids, weights.double(), w13, w2, limit=LIMIT)
    assert torch.equal(got, finer) == (format == "plain")


def test_masked_choices_add_nothing() -> None:
    x, (w13, w2) = (
        torch.randn(3, D).double(),
        make_weights(WeightFormat.PLAIN, torch.float64, stack=E),
    )
    w2.dense[-1] = torch.nan
    ids, weights = torch.tensor([[-1, 1], [-1, -1], [0, 2]]), torch.rand(3, K).double()
    got = e.routed_experts(x, ids, weights, w13, w2, limit=LIMIT)
    alone = e.routed_experts(x[:1], ids[:1, 1:], weights[:1, 1:], w13, w2, limit=LIMIT)
    torch.testing.assert_close(got[:1], alone, rtol=0, atol=1e-12)
    assert not got[1].any()
    assert got[2].isfinite().all()


def test_the_shared_expert_is_added_before_the_one_rounding() -> None:
    x, (w13, w2) = (
        torch.randn(7, D).bfloat16(),
        make_weights(WeightFormat.PLAIN, torch.float32, stack=E),
    )
    (ids, weights), shared = routing(7), torch.randn(7, D).bfloat16()
    wide = e.routed_experts(x, ids, weights, w13, w2, limit=LIMIT)
    got = e.routed_experts(x, ids, weights, w13, w2, limit=LIMIT, shared=lambda: shared)
    assert torch.equal(got, (wide + shared).bfloat16())


class TestSwiglu:
    def test_clamps_the_gate_from_above_and_up_on_both_sides(self) -> None:
        gate_up = torch.tensor([[-50.0, -3.0, 50.0, 1.0, 1.0, 2.0, -50.0, 50.0]]).double()
        gate, up = torch.tensor([-50.0, -3.0, 10.0, 1.0]), torch.tensor([1.0, 2.0, -10.0, 10.0])
        wanted = gate.double() * gate.double().sigmoid() * up.double()
        torch.testing.assert_close(e.swiglu(gate_up, limit=10.0)[0], wanted, rtol=1e-14, atol=0)

    def test_is_wide_for_bfloat16(self) -> None:
        assert e.swiglu(torch.randn(2, 8).bfloat16(), limit=10.0).dtype is torch.float32
