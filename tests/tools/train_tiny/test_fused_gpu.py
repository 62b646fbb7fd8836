"""On a GPU: the compiled forms of the trainer's model against the plain ones."""

from __future__ import annotations

import pytest
import torch

from leadline.config.presets import TINY_22M
from leadline.tools.train_tiny.rows import Rows
from leadline.tools.train_tiny.window import attend, attend_flex
from tests.tools.train_tiny.packed import packed_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ratio", [0, 2, 1])
@pytest.mark.parametrize("selects", [False, True], ids=["all", "selected"])
def test_flex_attention_is_the_plain_one_forwards_and_backwards(ratio: int, selects: bool) -> None:
    if selects and not ratio:
        pytest.skip("window layers select nothing")
    torch.manual_seed(ratio)
    batch = packed_rows(2, 1024).to(torch.device("cuda"))
    rows = Rows(batch, TINY_22M, 0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, latents = draw(2, 1024, 8, 64), draw(2, 1024, 64)
    entries = draw(2, 1024 // ratio, 64) if ratio else None
    sink = torch.randn(8, device="cuda", requires_grad=True)
    chosen = torch.rand(2, 1024, 1024 // ratio, device="cuda") < 0.1 if selects else None
    inputs = [q, latents, sink] + ([entries] if entries is not None else [])
    upstream = torch.randn_like(q)
    results = []
    for core in (attend, attend_flex):
        out, total = core(q, latents, entries, ratio, chosen, sink, rows)
        results.append((out, total, torch.autograd.grad(out, inputs, upstream)))
    (plain, plain_total, plain_grads), (fused, fused_total, fused_grads) = results
    torch.testing.assert_close(fused, plain, atol=0.05, rtol=0)
    torch.testing.assert_close(fused_total, plain_total, atol=0.05, rtol=0)
    for found, expected in zip(fused_grads, plain_grads, strict=True):
        assert (found - expected).float().norm() < 0.02 * expected.float().norm()
