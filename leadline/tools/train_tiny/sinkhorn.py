"""Sinkhorn normalisation of the mixing matrices, with its gradient in one pass.

Twenty rounds on 4 x 4 matrices are forty dependent steps on sixteen numbers a token; as separate
operations they would cost more than the rest of the block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch: the plain form is the only one there is
    triton = None


def sinkhorn(logits: Tensor, *, iters: int, eps: float, fused: bool) -> Tensor:
    """Logits ``[T, S, S]`` float32 (``[incoming, outgoing]``) -> mixing matrices (v41-model 2.3).

    Args:
        logits: of the row softmax.
        iters: rounds; the first is the softmax and a column step.
        eps: added after the softmax and to every denominator.
        fused: one kernel on the GPU, with the same values up to float32 rounding.
    """
    start = logits.softmax(-1) + eps
    if fused:
        matrices: Tensor = _Sinkhorn.apply(start, iters, eps)
        return matrices
    matrices = start / (start.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        matrices = matrices / (matrices.sum(-1, keepdim=True) + eps)
        matrices = matrices / (matrices.sum(-2, keepdim=True) + eps)
    return matrices


class _Sinkhorn(torch.autograd.Function):
    """Keeps the denominators only: the matrices follow from the last one, going backwards."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, iters: int, eps: float) -> Tensor:
        tokens, streams = start.shape[:2]
        result = torch.empty_like(start)
        denominators = start.new_empty(tokens, 2 * iters - 1, streams)
        _forward_kernel[_grid(tokens)](
            start.contiguous(), result, denominators, tokens, eps, iters, streams, _BLOCK
        )
        ctx.save_for_backward(result, denominators)
        ctx.iters = iters
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        result, denominators = ctx.saved_tensors
        tokens, streams = result.shape[:2]
        gradient = torch.empty_like(result)
        _backward_kernel[_grid(tokens)](
            gradients[0].contiguous(),
            result,
            denominators,
            gradient,
            tokens,
            ctx.iters,
            streams,
            _BLOCK,
        )
        return gradient, None, None


_BLOCK = 64  # tokens of a program


def _grid(tokens: int) -> tuple[int]:
    return (-(-tokens // _BLOCK),)


if triton is not None:

    @triton.jit
    def _addresses(tokens, S: tl.constexpr, BLOCK: tl.constexpr):
        """Offsets and mask ``[BLOCK, S, S]`` of this program's matrices."""
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        row = tl.arange(0, S)
        offset = token[:, None, None] * (S * S) + row[None, :, None] * S + row[None, None, :]
        return offset, (token < tokens)[:, None, None] & (row >= 0)[None, :, None], token, row

    @triton.jit
    def _forward_kernel(
        start,
        result,
        denominators,
        tokens,
        eps,
        iters: tl.constexpr,
        S: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        offset, mask, token, row = _addresses(tokens, S, BLOCK)
        matrix = tl.load(start + offset, mask=mask, other=1.0)
        steps = 2 * iters - 1
        side = token[:, None] * steps * S + row[None, :]
        inside = (token < tokens)[:, None] & (row >= 0)[None, :]
        total = tl.sum(matrix, axis=1) + eps
        tl.store(denominators + side, total, mask=inside)
        matrix = matrix / total[:, None, :]
        for i in range(iters - 1):
            total = tl.sum(matrix, axis=2) + eps
            tl.store(denominators + side + (2 * i + 1) * S, total, mask=inside)
            matrix = matrix / total[:, :, None]
            total = tl.sum(matrix, axis=1) + eps
            tl.store(denominators + side + (2 * i + 2) * S, total, mask=inside)
            matrix = matrix / total[:, None, :]
        tl.store(result + offset, matrix, mask=mask)

    @triton.jit
    def _backward_kernel(
        outer,
        result,
        denominators,
        gradient,
        tokens,
        iters: tl.constexpr,
        S: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        # A step M' = M / d with d = sum(M) + eps has dL/dM = (G' - sum(G' M')) / d along the same
        # axis, and M = M' d.
        offset, mask, token, row = _addresses(tokens, S, BLOCK)
        matrix = tl.load(result + offset, mask=mask, other=1.0)
        grad = tl.load(outer + offset, mask=mask, other=0.0)
        steps = 2 * iters - 1
        side = token[:, None] * steps * S + row[None, :]
        inside = (token < tokens)[:, None] & (row >= 0)[None, :]
        for back in range(iters - 1):
            i = iters - 2 - back
            total = tl.load(denominators + side + (2 * i + 2) * S, mask=inside, other=1.0)
            grad = (grad - tl.sum(grad * matrix, axis=1)[:, None, :]) / total[:, None, :]
            matrix = matrix * total[:, None, :]
            total = tl.load(denominators + side + (2 * i + 1) * S, mask=inside, other=1.0)
            grad = (grad - tl.sum(grad * matrix, axis=2)[:, :, None]) / total[:, :, None]
            matrix = matrix * total[:, :, None]
        total = tl.load(denominators + side, mask=inside, other=1.0)
        grad = (grad - tl.sum(grad * matrix, axis=1)[:, None, :]) / total[:, None, :]
        tl.store(gradient + offset, grad, mask=mask)
