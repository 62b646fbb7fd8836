"""The one-kernel form of Sinkhorn equals the plain one, forwards and backwards."""

from __future__ import annotations

import os

import pytest
import torch

from leadline.tools.train_tiny.sinkhorn import sinkhorn

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU, or Triton's interpreter",
)
@pytest.mark.parametrize("tokens", [1, 63, 200])
def test_values_and_gradients_equal_the_plain_form(tokens: int) -> None:
    torch.manual_seed(tokens)
    logits = (3 * torch.randn(tokens, 4, 4, device=DEVICE)).requires_grad_()
    upstream = torch.randn(tokens, 4, 4, device=DEVICE)
    plain, fused = (sinkhorn(logits, iters=20, eps=1e-6, fused=f) for f in (False, True))
    torch.testing.assert_close(fused, plain, atol=1e-6, rtol=0)
    expected, found = (torch.autograd.grad(out, logits, upstream)[0] for out in (plain, fused))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
