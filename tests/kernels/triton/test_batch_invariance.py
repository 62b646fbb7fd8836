"""In the mode, a row alone has the very bits that it has beside others, whatever their number."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.kernels import batch_invariance
from leadline.kernels.packed import LinearWeight, WeightFormat, align_scales
from leadline.kernels.triton import (
    attention,
    engram,
    experts,
    experts_fp8,
    grouped_linear,
    indexer,
    linear,
    mhc,
    norm,
    router,
    shared_expert,
)
from tests.kernels.triton.test_attention import make_case
from tests.kernels.triton.test_experts import choose, stacks
from tests.kernels.triton.test_indexer import WIDTH, paged_keys, queries
from tests.kernels.triton.test_linear import packed, tokens
from tests.kernels.triton.test_mhc import EPS, Site

OfRows = Callable[[Tensor], Tensor | tuple[Tensor, ...]]
ROWS = 66  # beyond what most kernels call few


@pytest.fixture(autouse=True)
def invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariance.switch, "enabled", True)
    monkeypatch.setattr(attention, "_suits_hopper", lambda *operands: False)


def route(device: torch.device) -> OfRows:
    x, gate = torch.randn(ROWS, 320, device=device).bfloat16(), torch.randn(24, 320, device=device)
    bias = torch.randn(24, device=device)
    return lambda rows: router.route(x[rows], gate, bias, num_experts_per_tok=3, scale=1.5)


def coefficients(device: torch.device) -> OfRows:
    site = Site(ROWS, 640, device)
    parameters = site.fn, site.base, site.scale
    return lambda rows: mhc.mhc_coefficients(
        site.streams[rows], *parameters, sinkhorn_iters=3, hc_eps=1e-6, eps=EPS
    )


def seam(device: torch.device) -> OfRows:
    y, streams, post, comb, mix, weight = Site(ROWS, 96, device).seam
    return lambda rows: mhc.mhc_seam(
        y[rows], streams[rows], post[rows], comb[rows], mix[rows], weight, eps=EPS
    )


def rms_norm(device: torch.device) -> OfRows:
    x, weight = tokens(ROWS, 96, device=device), torch.rand(96, device=device)
    return lambda rows: norm.rms_norm(x[rows], weight, eps=EPS)


def fp8_linear(device: torch.device) -> OfRows:
    x, weight = tokens(ROWS, 640, device=device), packed(64, 640, device=device)
    return lambda rows: linear.linear(x[rows], weight)


def aligned_linear(device: torch.device) -> OfRows:
    x, weight = tokens(ROWS, 640, device=device), align_scales(packed(64, 640, device=device))
    assert weight.aligned
    return lambda rows: linear.linear(x[rows], weight)


def plain_linear(device: torch.device) -> OfRows:
    x, dense = tokens(ROWS, 320, device=device), torch.randn(24, 320, device=device).bfloat16()
    return lambda rows: linear.linear(x[rows], LinearWeight(dense, WeightFormat.PLAIN))


def wide_linear(device: torch.device) -> OfRows:
    x, weight = tokens(ROWS, 320, device=device), torch.randn(100, 320, device=device)
    return lambda rows: linear.wide_linear(x[rows], weight)


def output_projection(device: torch.device) -> OfRows:
    x = tokens(ROWS, 4, 64, device=device)
    wo_a = packed(2, 64, 128, device=device, quantizes_input=False)
    wo_b = packed(64, 128, device=device)
    return lambda rows: grouped_linear.output_projection(x[rows], wo_a, wo_b)


def shared(device: torch.device) -> OfRows:
    x = tokens(ROWS, 96, device=device) / 64
    weights = packed(128, 96, device=device), packed(96, 64, device=device)
    return lambda rows: shared_expert.shared_expert(x[rows], *weights, limit=10.0)


def routed(device: torch.device) -> OfRows:
    """Many rows for one expert, few for the others."""
    x, ids = tokens(ROWS, 64, device=device), choose(ROWS, [0, 1, 2, 3], 2, device)
    ids[:, 0], weights = 0, torch.rand(ROWS, 2, device=device)
    ids[:, 1].clamp_(min=1)
    both = stacks(4, 64, 32, device)
    return lambda rows: experts.routed_experts(x[rows], ids[rows], weights[rows], *both, limit=4.0)


def inject(device: torch.device) -> OfRows:
    streams, kv = tokens(ROWS, 4, 96, device=device), tokens(ROWS, 5 * 96, device=device)
    q_weight, k_weight = torch.rand(2, 4, 96, device=device)
    live = torch.ones(ROWS, dtype=torch.bool, device=device)
    return lambda rows: engram.engram_inject(
        streams[rows], kv[rows], q_weight, k_weight, live[rows], eps=EPS
    )


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # a sigmoid of the interpreter's
@pytest.mark.parametrize(
    "make",
    [
        *(route, coefficients, seam, rms_norm, fp8_linear, aligned_linear, plain_linear),
        *(wide_linear, output_projection, shared, routed, inject),
    ],
)
def test_rows_alone_and_together(device: torch.device, make: Callable[..., OfRows]) -> None:
    run = make(device)
    everyone = torch.arange(ROWS, device=device)
    together = parts(run(everyone))
    for rows in (everyone[40:41], everyone[50:60]):
        for one, other in zip(parts(run(rows)), together, strict=True):
            assert torch.equal(one, other[rows])


def test_fp8_experts_are_chosen_alike_for_any_number_of_rows(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = [MagicMock(), MagicMock()]  # of which only the settings count
    for name, product in zip(("_gate_up", "_down"), products, strict=True):
        monkeypatch.setattr(experts_fp8, name, product)
    monkeypatch.setattr(experts_fp8, "quantize_rows", lambda *rows: ())
    both = stacks(4, 64, 32, device)
    for rows in (1, 200):
        x, ids = tokens(rows, 64, device=device), choose(rows, [0, 1, 2, 3], 2, device)
        experts_fp8.pair_outputs(x, ids, torch.rand(rows, 2, device=device), *both, limit=4.0)
    for product in products:
        alone, together = (
            {name: call.kwargs[name] for name in ("D", "F", "SPAN", "TILE", "batch")}
            for call in product.__getitem__.return_value.call_args_list
        )
        assert alone == together


def parts(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def test_attention_alone_beside_rows_that_select_more(device: torch.device) -> None:
    case = make_case(device, rows=5)
    assert case.selected is not None
    case.selected[2, 7:] = -1
    together = case.run()
    own = {name: getattr(case, name)[2:3] for name in ("q", "cos", "sin", "req_of_row")}
    windows = {name: getattr(case, name)[2:3] for name in ("window_index", "window_width")}
    alone = case.replace(**own, **windows, selected=case.selected[2:3, :7]).run()
    assert torch.equal(alone[0], together[2])


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_index_scores_alone_beside_longer_contexts(device: torch.device, exact: bool) -> None:
    q, weights = queries(9, 4, device)
    keys, table = paged_keys(torch.randn(2, 150, WIDTH), device)
    request = torch.tensor([0] * 8 + [1], device=device)
    visible = torch.tensor([*range(20, 28), 150], device=device)

    def run(rows: slice, columns: int) -> Tensor:
        return indexer.index_logits(
            *(q[rows], weights[rows], keys, table, request[rows], visible[rows], columns),
            exact_rounding=exact,
        )

    together = run(slice(None), 150)
    assert torch.equal(run(slice(5, 6), 25)[0], together[5, :25])
    assert torch.equal(run(slice(8, 9), 150)[0], together[8])
