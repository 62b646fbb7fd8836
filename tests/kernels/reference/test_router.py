"""Which experts, and how much they count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from leadline.kernels.reference.router import hash_route, route


def literal(
    x: Tensor, gate: Tensor, bias: Tensor, k: int, scale: float
) -> tuple[list[int], list[float]]:
    """5.1 for one row ``[D]``."""
    logits = [float(x @ g) for g in gate]
    scores = [math.sqrt(math.log1p(math.exp(z)) if z <= 20 else z) for z in logits]
    order = sorted(range(len(scores)), key=lambda e: scores[e] + float(bias[e]), reverse=True)
    experts = sorted(order[:k])
    total = sum(scores[e] for e in experts) + 1e-20
    return experts, [scores[e] / (total if k > 1 else 1) * scale for e in experts]


@pytest.mark.parametrize("k", [1, 2, 6])
def test_equals_the_formula(k: int) -> None:
    x, gate = torch.randn(20, 16).double() * 4, torch.randn(12, 16).double()
    bias = torch.randn(12).double()
    experts, weights = route(x, gate, bias, num_experts_per_tok=k, scale=1.5)
    for row in range(20):
        wanted_experts, wanted_weights = literal(x[row], gate, bias, k, 1.5)
        assert experts[row].tolist() == wanted_experts
        torch.testing.assert_close(
            weights[row], torch.tensor(wanted_weights).double(), rtol=1e-6, atol=0
        )


def test_bias_selects_and_never_weighs() -> None:
    """A bias that forces experts 3 and 5 leaves their weights as their scores have them."""
    x, gate = torch.randn(8, 16), torch.randn(6, 16)
    bias = torch.tensor([0.0, 0, 0, 1e3, 0, 2e3])
    experts, weights = route(x, gate, bias, num_experts_per_tok=2, scale=1.5)
    assert experts.tolist() == [[3, 5]] * 8
    scores = torch.nn.functional.softplus(x @ gate.T).sqrt()[:, [3, 5]]
    torch.testing.assert_close(weights, 1.5 * scores / scores.sum(1, keepdim=True))


def test_rows_of_images_choose_with_their_own_bias() -> None:
    x, gate = torch.randn(4, 16), torch.randn(6, 16)
    bias = torch.tensor([9.0, 9, 0, 0, 0, 0])
    image_rows = torch.tensor([False, True, False, True])
    experts, weights = route(
        x, gate, bias, None, image_rows, bias.flip(0), num_experts_per_tok=2, scale=1.5
    )
    assert experts.tolist() == [[0, 1], [4, 5]] * 2
    alone = route(x, gate, bias.flip(0), num_experts_per_tok=2, scale=1.5)
    torch.testing.assert_close(weights[image_rows], alone[1][image_rows])


def test_a_table_selects_and_never_weighs() -> None:
    """As a bias would that forces the table's experts; ids ascend, whatever its order."""
    x, gate = torch.randn(3, 16), torch.randn(6, 16)
    table = torch.tensor([[5, 1], [2, 4], [0, 3]])
    tokens, groups = torch.tensor([1, 0, 1], dtype=torch.int32), torch.tensor([0, 0, -1])
    experts, weights = hash_route(x, gate, table, tokens, groups, scale=1.5)
    assert experts.tolist() == [[2, 4], [1, 5], [-1, -1]]
    for row, chosen in enumerate(([2, 4], [1, 5])):
        bias = torch.zeros(6).index_fill(0, torch.tensor(chosen), 1e3)
        _, wanted = route(x[row : row + 1], gate, bias, num_experts_per_tok=2, scale=1.5)
        torch.testing.assert_close(weights[row : row + 1], wanted)


def test_equal_biases_change_nothing() -> None:
    x, gate = torch.randn(8, 16), torch.randn(6, 16)
    plain = route(x, gate, torch.zeros(6), num_experts_per_tok=3, scale=1.5)
    shifted = route(x, gate, torch.full((6,), 2.0), num_experts_per_tok=3, scale=1.5)
    for one, other in zip(plain, shifted, strict=True):
        assert torch.equal(one, other)


def test_experts_ascend_and_differ() -> None:
    experts, weights = route(
        torch.randn(50, 16), torch.randn(9, 16), torch.randn(9), num_experts_per_tok=4, scale=2.0
    )
    assert (experts.diff(dim=1) > 0).all()
    torch.testing.assert_close(weights.sum(1), torch.full((50,), 2.0))


@pytest.mark.parametrize("logit", [-80.0, -20.0, 19.9, 20.1, 1e4, 1e8], ids=str)
def test_extreme_logits_weigh_finite(logit: float) -> None:
    """softplus turns linear above 20; far below zero the score is small, but above zero."""
    x, gate = torch.full((1, 1), logit), torch.ones(4, 1)
    _, weights = route(x, gate, torch.zeros(4), num_experts_per_tok=2, scale=1.5)
    score = math.sqrt(math.log1p(math.exp(logit)) if logit <= 20 else logit)
    wanted = 1.5 * score / (2 * score + 1e-20)  # 1e-20 counts where scores are that small
    torch.testing.assert_close(weights, torch.full((1, 2), wanted))


def test_bfloat16_rows_are_scored_wide() -> None:
    x, gate, bias = torch.randn(8, 512).bfloat16(), torch.randn(6, 512), torch.zeros(6)
    experts, weights = route(x, gate, bias, num_experts_per_tok=3, scale=1.5)
    wide = route(x.float(), gate, bias, num_experts_per_tok=3, scale=1.5)
    assert weights.dtype is torch.float32
    assert torch.equal(experts, wide[0])
    assert torch.equal(weights, wide[1])


def test_gate_in_bfloat16_is_taken_wide() -> None:
    x, gate, bias = torch.randn(8, 64).bfloat16(), torch.randn(6, 64).bfloat16(), torch.zeros(6)
    narrow = route(x, gate, bias, num_experts_per_tok=3, scale=1.5)
    wide = route(x, gate.float(), bias, num_experts_per_tok=3, scale=1.5)
    for one, other in zip(narrow, wide, strict=True):
        assert torch.equal(one, other)


def test_of_equal_scores_the_lower_id_is_taken() -> None:
    bias = torch.zeros(40)
    bias[[7, 9, 30]] = 1.0
    experts, _ = route(
        torch.randn(50, 16), torch.zeros(40, 16), bias, num_experts_per_tok=5, scale=1.0
    )
    assert experts.tolist() == [[0, 1, 7, 9, 30]] * 50
