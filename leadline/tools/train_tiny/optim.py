"""Muon for stacks of matrices, AdamW for the rest, and clipping; nothing here waits for the GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

# Jordan's quintic: steep at zero, so that five steps bring all singular values to about 0.7..1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


class Muon(Optimizer):
    """``torch.optim.Muon`` for parameters ``[..., out, in]``: each is a whole batch of matrices.

    The momentum's nearest orthogonal matrix is the update, scaled by ``sqrt(max(1, out / in))``
    so that outputs move equally far whatever the shape (Jordan et al., "Muon: an optimizer for
    hidden layers in neural networks", 2024). Iterates in bf16 on a GPU, in float32 on a CPU,
    where bf16 products are slow.

    Args:
        params: float32.
        lr: spectral norm of a square matrix's update.
        weight_decay: share of a weight that ``1 / lr`` steps take away.
        momentum: Nesterov's.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; ``closure`` is not used."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                average = state["momentum_buffer"]
                average.lerp_(gradient, 1 - momentum)
                update = orthogonalize(gradient.lerp(average, momentum))
                rows, cols = parameter.shape[-2:]
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(update, alpha=-lr * math.sqrt(max(1.0, rows / cols)))


def orthogonalize(x: Tensor) -> Tensor:
    """Matrices ``[..., m, n]`` -> roughly ``U V^T`` of their ``U S V^T``, by Newton-Schulz."""
    a, b, c = _COEFFICIENTS
    rows, cols = x.shape[-2:]
    y = x.reshape(-1, rows, cols).to(torch.bfloat16 if x.is_cuda else torch.float32)
    if rows > cols:
        y = y.mT
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    if rows > cols:
        y = y.mT
    return y.reshape(x.shape)


def adamw(params: Iterable[dict[str, Any]]) -> AdamW:
    """AdamW for embeddings, tables, norms, mixers and sinks: fused and without decay.

    Rows of the n-gram tables are met rarely, so their gradients are tiny: ``eps`` stays below.

    Args:
        params: parameter groups with their ``lr``.
    """
    return AdamW(params, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True)


def clip_gradients(gradients: Sequence[Tensor], max_norm: float) -> tuple[Tensor, Tensor]:
    """Scale gradients in place to a global norm of at most ``max_norm``.

    Where the norm is not finite they all become zero, so that one bad batch, or a diverging run,
    never reaches the masters.

    Returns:
        The norm before, float32, and whether it is finite, bool; scalars on the device.
    """
    norm = nn.utils.get_total_norm(gradients)
    is_finite = norm.isfinite()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.copy_(torch.where(is_finite, gradient * scale, 0.0))
    return norm, is_finite
