"""Exact values and how far honest ones may lie from them, carried through what kernels compute.

A sum in another order differs in its last bits. A rounding mostly takes that away again, but moves
what lies beside a border of two steps by a whole step, which the next product hands on. So no norm
over a result tells an honest kernel from a broken one: of few values a single step is more than it,
of many a broken one less. Here a border counts where there is one, and nothing where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Error of a sum, of the root of its terms' squares.
FLOAT32_SUM = 2.0**-16
# FP8 tensor cores drop what lies 13 bits below the largest term: of 128 terms mostly 2^-10, seldom
# 2^-9. The interpreter adds in float32.
FP8_SUM = 2.0**-7 if torch.cuda.is_available() else FLOAT32_SUM

_SILU_SLOPE = 1.1  # the steepest one
_ELEMENTARY = 2.0**-18  # relative error of float32's functions


@dataclass(frozen=True)
class Bounded:
    """Float64 values, and how far from each a computed one may be."""

    value: Tensor
    error: Tensor

    @staticmethod
    def exactly(value: Tensor) -> Bounded:
        """What is given."""
        return Bounded(value.double(), torch.zeros_like(value, dtype=torch.float64))

    def product(self, weight: Tensor, sum_error: float) -> Bounded:
        """Rows ``[.., in]`` by matrices ``[.., out, in]``."""

        def times(x: Tensor, matrix: Tensor) -> Tensor:
            return torch.einsum("...i,...oi->...o", x, matrix)

        spread = times(self.value.square(), weight.square()).sqrt()
        error = times(self.error, weight.abs()) + sum_error * spread
        return Bounded(times(self.value, weight), error)

    def rounded(self, to: Callable[[Tensor], Tensor]) -> Bounded:
        """By a rounding that keeps the order: between those of the smallest and the largest."""
        outward = self.error.copysign(self.value)
        inner, outer = (to(end).double() for end in (self.value - outward, self.value + outward))
        return Bounded((inner + outer) / 2, (outer - inner).abs() / 2)

    def blurred(self, share: float) -> Bounded:
        """By a share of the largest value of each row."""
        return Bounded(self.value, self.error + share * self.value.abs().amax(-1, keepdim=True))

    def swiglu(self, limit: float) -> Bounded:
        """Clamped, of ``[.., 2 F]``, gate first."""
        (gate, up), (gate_error, up_error) = (x.chunk(2, -1) for x in (self.value, self.error))
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        silu, silu_error = gate * gate.sigmoid(), _SILU_SLOPE * gate_error
        error = silu_error * up.abs() + (silu.abs() + silu_error) * up_error
        return Bounded(silu * up, error + _ELEMENTARY * (silu * up).abs())

    def times(self, factor: Tensor) -> Bounded:
        """In float32."""
        value, error = self.value * factor, self.error * factor.abs()
        return Bounded(value, error + _ELEMENTARY * value.abs())

    def flatten(self, first: int) -> Bounded:
        """As of a tensor."""
        return Bounded(self.value.flatten(first), self.error.flatten(first))

    def contains(self, actual: Tensor) -> bool:
        """Whether all of them are honest."""
        return bool(((actual.double() - self.value).abs() <= self.error).all())


def expert_outputs(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    limit: float,
    activation: Callable[[Tensor], Tensor],
    kept: Callable[[Tensor], Tensor],
    sum_error: float,
) -> Bounded:
    """Routed experts, ``[m, D]``.

    Args:
        x: ``[m, D]`` as the first product takes it.
        ids: ``[m, k]``, -1 for none.
        weights: ``[m, k]``.
        w13: ``[E, 2 F, D]`` float64, gate rows first.
        w2: ``[E, D, F]`` float64.
        limit: of SwiGLU.
        activation: the rounding to the dtype of activations.
        kept: the rounding of what the second product takes.
        sum_error: of products.
    """
    gate_up = Bounded.exactly(x.unsqueeze(1)).product(w13[ids], sum_error).rounded(activation)
    hidden = gate_up.swiglu(limit).times(weights.unsqueeze(-1)).rounded(activation)
    outputs = hidden.rounded(kept).product(w2[ids], sum_error).rounded(activation)
    error = outputs.error + FLOAT32_SUM * outputs.value.abs()
    there = (ids >= 0).unsqueeze(-1)
    return Bounded(*(part.where(there, 0.0).sum(1) for part in (outputs.value, error)))


def few_differ(actual: Tensor, wanted: Tensor, share: float = 0.01) -> bool:
    """Whether no more do than roundings that a sum's order decides: of a handful, three."""
    assert actual.shape == wanted.shape
    return bool((actual != wanted).sum() <= 3 + share * actual.numel())


def bf16(x: Tensor) -> Tensor:
    """To the nearest one."""
    return x.bfloat16()
