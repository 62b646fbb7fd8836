"""The router against its definition, and at the edges of kernels.md 2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.kernels.reference import router as reference
from leadline.kernels.triton import router


def inputs(rows: int, width: int, experts: int, device: torch.device) -> tuple[Tensor, ...]:
    x = torch.randn(rows, width, device=device).bfloat16()
    gate = (torch.randn(experts, width, device=device) / width**0.5).bfloat16()
    return x, gate, 0.1 * torch.randn(experts, device=device)


def route(
    x: Tensor, gate: Tensor, bias: Tensor, *, k: int = 3, scale: float = 1.5
) -> tuple[Tensor, Tensor]:
    return router.route(x, gate, bias, num_experts_per_tok=k, scale=scale)


def wanted(
    x: Tensor, gate: Tensor, bias: Tensor, *, k: int = 3, scale: float = 1.5
) -> tuple[Tensor, Tensor]:
    wide = (x.double(), gate.double(), bias.double())
    return reference.route(*wide, num_experts_per_tok=k, scale=scale)


@pytest.mark.parametrize(
    ("rows", "width", "experts", "k"),
    [(0, 64, 8, 2), (1, 64, 8, 1), (5, 96, 40, 3), (17, 320, 24, 6), (3, 1088, 65, 6)],
)
def test_equals_the_definition(
    device: torch.device, rows: int, width: int, experts: int, k: int
) -> None:
    """Experts and widths need not fill a tile."""
    given = inputs(rows, width, experts, device)
    ids, weights = route(*given, k=k)
    wanted_ids, wanted_weights = wanted(*given, k=k)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights.float(), rtol=1e-5, atol=0)


def test_padding_chooses_nobody(device: torch.device) -> None:
    x, gate, bias = inputs(5, 64, 8, device)
    group = torch.tensor([0, 0, 4, -1, -1], device=device)
    ids, weights = router.route(x, gate, bias, group, num_experts_per_tok=3, scale=1.5)
    alone, _ = reference.route(x, gate, bias, group, num_experts_per_tok=3, scale=1.5)
    assert torch.equal(ids, alone)
    assert (ids[3:] == -1).all()
    assert weights.isfinite().all()


def test_rows_of_images_choose_with_their_own_bias(device: torch.device) -> None:
    """And weigh by the same scores; a row of text is the same beside them."""
    x, gate, bias = inputs(19, 96, 40, device)
    image_bias = torch.randn(40, device=device)
    images = torch.arange(19, device=device) % 3 == 1
    ids, weights = router.route(
        x, gate, bias, None, images, image_bias, num_experts_per_tok=3, scale=1.5
    )
    of_text, of_images = route(x, gate, bias), route(x, gate, image_bias)
    assert not torch.equal(of_text[0], of_images[0])
    for got, text, image in zip((ids, weights), of_text, of_images, strict=True):
        assert torch.equal(got, torch.where(images.unsqueeze(1), image, text))


def hash_inputs(
    rows: int, width: int, experts: int, k: int, device: torch.device
) -> tuple[Tensor, ...]:
    x, gate, _ = inputs(rows, width, experts, device)
    table = torch.rand(50, experts, device=device).argsort(-1)[:, :k].contiguous()
    return x, gate, table, torch.randint(0, 50, (rows,), device=device).int()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "experts", "k"), [(0, 64, 8, 2), (1, 64, 8, 1), (19, 96, 40, 6)]
)
def test_tokens_choose_the_experts_of_their_table(
    device: torch.device, dtype: torch.dtype, rows: int, width: int, experts: int, k: int
) -> None:
    x, gate, table, tokens = hash_inputs(rows, width, experts, k, device)
    group = torch.arange(rows, device=device) % 5 - 1
    ids, weights = router.hash_route(x, gate, table.to(dtype), tokens, group, scale=1.5)
    wanted_ids, wanted_weights = reference.hash_route(
        x.double(), gate.double(), table, tokens, group, scale=1.5
    )
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights.float(), rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes by numpy
def test_a_broken_row_keeps_the_experts_of_its_token(device: torch.device) -> None:
    x, gate, table, tokens = hash_inputs(3, 64, 8, 2, device)
    x[1] = torch.nan
    ids, weights = router.hash_route(x, gate, table, tokens, scale=1.5)
    assert torch.equal(ids, table[tokens].sort(-1).values)
    assert weights.isnan().any(-1).tolist() == [False, True, False]


def test_a_wide_gate_keeps_its_bits(device: torch.device) -> None:
    x, _, bias = inputs(4, 64, 8, device)
    gate = torch.randn(8, 64, device=device)
    (ids, weights), (wanted_ids, wanted_weights) = route(x, gate, bias), wanted(x, gate, bias)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights.float(), rtol=1e-5, atol=0)


def test_rows_of_a_wider_tensor_are_read_as_they_are(device: torch.device) -> None:
    x, gate, bias = inputs(4, 64, 8, device)
    strided = torch.cat((x, x), dim=1)[:, 64:]
    for a, b in zip(route(strided, gate, bias), route(x, gate, bias), strict=True):
        assert torch.equal(a, b)


def test_among_equal_scores_lower_experts_win(device: torch.device) -> None:
    x, gate, bias = torch.zeros(2, 64).bfloat16(), torch.zeros(40, 64).bfloat16(), torch.zeros(40)
    bias[[7, 9, 30]] = 1.0
    ids, weights = route(x.to(device), gate.to(device), bias.to(device), k=5)
    assert ids.tolist() == [[0, 1, 7, 9, 30]] * 2
    torch.testing.assert_close(weights, torch.full_like(weights, 0.3))


def test_masked_experts_are_never_chosen(device: torch.device) -> None:
    """A bias of -inf, as masks of experts have it; negative sums are in order too."""
    x, gate, bias = inputs(5, 64, 40, device)
    bias = bias - 5
    bias[::2] = -torch.inf
    ids, weights = route(x, gate, bias, k=6)
    wanted_ids, wanted_weights = wanted(x, gate, bias, k=6)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("logit", [-80.0, -12.0, -3.0, 0.5, 19.9, 20.1, 1e4], ids=str)
def test_extreme_logits_weigh_finite(device: torch.device, logit: float) -> None:
    x = torch.zeros(1, 64, device=device).bfloat16()
    x[0, 0] = logit
    gate = torch.zeros(8, 64, device=device).bfloat16()
    gate[:, 0] = torch.linspace(0.5, 1, 8, device=device).bfloat16()
    bias = torch.zeros(8, device=device)
    _, weights = route(x, gate, bias)
    torch.testing.assert_close(weights, wanted(x, gate, bias)[1].float(), rtol=2e-5, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes by numpy
def test_broken_rows_have_experts_and_stay_alone(device: torch.device) -> None:
    x, gate, bias = inputs(4, 64, 40, device)
    sound_ids, sound_weights = route(x, gate, bias)
    x[0], x[2, 5], x[3] = torch.nan, torch.inf, -torch.inf
    ids, weights = route(x, gate, bias)
    assert torch.equal(ids[1], sound_ids[1])
    assert torch.equal(weights[1], sound_weights[1])
    assert weights[0].isnan().all()
    assert ((ids >= 0) & (ids < 40)).all()
    assert (ids.diff(dim=1) > 0).all()
