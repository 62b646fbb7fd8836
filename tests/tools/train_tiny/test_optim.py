"""Muon over stacks, clipping, and the masters behind compute weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leadline.tools.train_tiny.optim import Muon, clip_gradients, orthogonalize


@pytest.mark.parametrize("shape", [(32, 32), (64, 32), (32, 96)], ids=["square", "tall", "wide"])
def test_a_stack_moves_as_its_matrices_would_one_by_one(shape: tuple[int, int]) -> None:
    start, gradients = torch.randn(3, *shape), torch.randn(4, 3, *shape)
    stack = nn.Parameter(start.clone())
    ours = Muon([stack], lr=0.02, weight_decay=0.1)
    singles = [nn.Parameter(matrix.clone()) for matrix in start]
    library = torch.optim.Muon(singles, lr=0.02, weight_decay=0.1)
    for gradient in gradients:
        stack.grad = gradient
        for single, part in zip(singles, gradient, strict=True):
            single.grad = part
        ours.step()
        library.step()
    # The library iterates in bf16: its updates, of up to 0.02 times sqrt(2) each, are so coarse.
    torch.testing.assert_close(stack.detach(), torch.stack(singles).detach(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("shape", [(2, 48, 48), (2, 3, 64, 32)], ids=["matrices", "experts"])
def test_singular_values_of_an_update_are_about_one(shape: tuple[int, ...]) -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
    assert values.shape == (*shape[:-2], min(shape[-2:]))
    assert (values < 1.3).all()
    assert (values > 0.3).float().mean() > 0.9


def test_a_gradient_of_zero_moves_nothing() -> None:
    matrix = nn.Parameter(torch.randn(1, 8, 8))
    before = matrix.detach().clone()
    matrix.grad = torch.zeros_like(matrix)
    Muon([matrix], lr=0.1).step()
    assert torch.equal(matrix.detach(), before)


def test_gradients_are_scaled_to_the_norm_asked_for() -> None:
    gradients = [torch.full((4,), 3.0), torch.full((3, 4), 4.0)]
    norm, is_finite = clip_gradients(gradients, 1.0)
    torch.testing.assert_close(norm, torch.tensor(228.0).sqrt())
    assert is_finite
    torch.testing.assert_close(torch.cat([g.flatten() for g in gradients]).norm().item(), 1.0)


def test_small_gradients_stay_as_they_are() -> None:
    gradients = [torch.full((4,), 0.1)]
    clip_gradients(gradients, 1.0)
    assert torch.equal(gradients[0], torch.full((4,), 0.1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_become_zero(bad: float) -> None:
    gradients = [torch.ones(4), torch.tensor([1.0, bad])]
    _, is_finite = clip_gradients(gradients, 1.0)
    assert not is_finite
    assert not torch.cat(gradients).any()
