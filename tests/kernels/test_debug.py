"""The non-finite switch: which op, which layer, which row."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from leadline.kernels import debug, ops
from leadline.kernels.debug import NonFiniteError
from tests.steps import Stepper, make_stepper


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug.switch, "enabled", True)


@pytest.fixture
def stepper(golden: Path) -> Stepper:
    return make_stepper(golden / "v41-reference", dtype=torch.bfloat16)


def with_value(value: float, row: int, *, shape: tuple[int, ...] = (4, 8)) -> Tensor:
    x = torch.ones(shape)
    x[row].view(-1)[3] = value
    return x


class TestOneOp:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
    @pytest.mark.parametrize("row", [0, 3])
    def test_names_op_and_row(self, switched_on: None, value: float, row: int) -> None:
        with pytest.raises(NonFiniteError, match=rf"op wide_linear .* in row {row}$") as caught:
            ops.wide_linear(with_value(value, row), torch.eye(8))
        assert (caught.value.op, caught.value.row) == ("wide_linear", row)
        assert caught.value.layer is None

    def test_names_the_first_of_several_rows(self, switched_on: None) -> None:
        x = with_value(math.nan, 3)
        x[1] = math.inf
        with pytest.raises(NonFiniteError) as caught:
            ops.rms_norm(x, torch.ones(8), eps=1e-20)
        assert caught.value.row == 1

    def test_looks_at_every_output(self, switched_on: None) -> None:
        """``post`` may be broken while ``pre``, the first output, is not."""
        base = torch.zeros(8)
        base[2] = math.nan
        with pytest.raises(NonFiniteError, match="mhc_coefficients"):
            ops.mhc_coefficients(
                torch.ones(3, 2, 4),
                torch.ones(8, 8),
                base,
                torch.ones(3),
                sinkhorn_iters=2,
                hc_eps=1e-6,
                eps=1e-20,
            )

    def test_overflow_is_the_fault_of_the_op_that_made_it(self, switched_on: None) -> None:
        x = torch.full((1, 4), 3e38)
        with pytest.raises(NonFiniteError, match="op wide_linear "):
            ops.wide_linear(x, torch.ones(1, 4))

    def test_says_nothing_when_off(self) -> None:
        assert ops.wide_linear(with_value(math.nan, 2), torch.eye(8))[2].isnan().any()

    def test_finite_and_empty_results_pass(self, switched_on: None) -> None:
        assert ops.wide_linear(torch.ones(4, 8), torch.eye(8)).shape == (4, 8)
        assert ops.mhc_collapse(torch.empty(0, 4, 8), torch.empty(0, 4)).shape == (0, 8)

    def test_experts_of_a_router_are_no_floats(self, switched_on: None) -> None:
        ids, _ = ops.route(
            torch.ones(2, 8), torch.eye(8), torch.zeros(8), num_experts_per_tok=2, scale=1.0
        )
        assert ids.dtype is torch.int64

    def test_ops_keep_their_contracts(self) -> None:
        assert ops.rms_norm.__doc__ is not None
        assert ops.rms_norm.__name__ == "rms_norm"


class TestModel:
    """A value planted somewhere is blamed on the op that first carries it, in its layer and row."""

    TOKENS = (*range(10, 40), 77, *range(40, 45))  # token 77 is row 30

    def test_a_sound_model_passes(self, switched_on: None, stepper: Stepper) -> None:
        """Scores of entries out of sight are -inf and mean no harm."""
        logits = stepper.feed(stepper.start(list(self.TOKENS) * 4), 50)
        assert logits.isfinite().all()

    def test_a_token(self, switched_on: None, stepper: Stepper) -> None:
        stepper.model.embed[77, 5] = math.nan
        with pytest.raises(NonFiniteError, match=r"op mhc_collapse in layer 0 .* in row 30$"):
            stepper.feed(stepper.start(list(self.TOKENS)))

    @pytest.mark.parametrize("layer", [1, 4, 5], ids=["lower", "cut", "upper"])
    def test_a_norm_weight(self, switched_on: None, stepper: Stepper, layer: int) -> None:
        stepper.model.blocks[layer].ffn_norm[3] = math.inf
        with pytest.raises(NonFiniteError, match=f"op rms_norm in layer {layer} "):
            stepper.feed(stepper.start(list(self.TOKENS)))

    def test_one_expert(self, switched_on: None, stepper: Stepper) -> None:
        """Only the rows that it was chosen for are broken; the first of them is named."""
        moe, ids = stepper.model.blocks[3].ffn, []
        route = ops.route
        moe.w2.dense[6] = math.nan
        with pytest.MonkeyPatch.context() as patch:

            def watch(x: Tensor, gate: Tensor, *rest: Tensor, **kwargs: float) -> object:
                result = route(x, gate, *rest, **kwargs)  # type: ignore[arg-type]
                if gate is moe.gate:
                    ids.append(result[0])
                return result

            patch.setattr(ops, "route", watch)
            with pytest.raises(NonFiniteError, match="op routed_experts in layer 3 ") as caught:
                stepper.feed(stepper.start(list(self.TOKENS)))
        assert caught.value.row == int((ids[0] == 6).any(1).nonzero()[0])

    def test_the_second_request_of_a_step(self, switched_on: None, stepper: Stepper) -> None:
        stepper.model.embed[77, 5] = math.nan
        sound, broken = stepper.start([5, 6, 7, 8]), stepper.start([9, 77])
        with pytest.raises(NonFiniteError) as caught:
            stepper.step([(sound, 4), (broken, 2)])
        assert caught.value.row == 5
