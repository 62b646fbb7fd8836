"""One op at one shape: how its inputs are made, what it should cost, what it stands beside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor


class Rate(StrEnum):
    """Which units do the arithmetic: the ceiling that FLOPs are divided by."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP32 = "fp32"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one shape (kernels.md 17.1).

    Attributes:
        kernel: section of kernels.md.
        op: name of the op.
        shape: what distinguishes the case, such as ``T=8``.
        make: device -> fresh arguments, from torch's global generator. Sizes are official.
        fused: ours, on these arguments.
        twin: the definition, on the same arguments; also what is timed as *unfused*.
        check: (ours, the twin's) -> relative L2 error; AssertionError if it is too large.
        bytes: that must move, by the formula of kernels.md.
        flops: likewise.
        rate: of the FLOPs.
        target_us: of kernels.md 17.3 and 18.10, or None where it is a share of the ceiling.
        target_share: of the ceiling, or None.
        peers: name -> microseconds measured on an H200 (kernels.md 18), same shape.
        unfused: separate launches of the same; None takes the twin.
    """

    kernel: str
    op: str
    shape: str
    make: Callable[[torch.device], tuple[Any, ...]]
    fused: Callable[..., Any]
    twin: Callable[..., Any]
    check: Callable[[Any, Any], float]
    bytes: float
    flops: float = 0.0
    rate: Rate = Rate.BF16
    target_us: float | None = None
    target_share: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    unfused: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """As the command line and tests call it."""
        return f"{self.op}[{self.shape}]"


def relative_l2(actual: Tensor, wanted: Tensor) -> float:
    """``||actual - wanted|| / ||wanted||`` in float64 (kernels.md 0.4).

    Raises:
        AssertionError: shapes differ, or something is not finite.
    """
    assert actual.shape == wanted.shape, (actual.shape, wanted.shape)
    difference = (actual.double() - wanted.double()).norm()
    error = float(difference / wanted.double().norm().clamp(min=1e-300))
    assert math.isfinite(error), "a result is not finite"
    return error


def within(limit: float) -> Callable[[Any, Any], float]:
    """A check of one tensor, or of several: relative L2 of each at most ``limit``."""

    def check(actual: Any, wanted: Any) -> float:
        pairs = (
            zip(actual, wanted, strict=True) if isinstance(actual, tuple) else [(actual, wanted)]
        )
        error = max(relative_l2(a, b) for a, b in pairs)
        assert error <= limit, f"relative L2 error is {error:.2e}, allowed are {limit:.2e}"
        return error

    return check


def same(actual: Any, wanted: Any) -> float:
    """A check that every byte is equal."""
    pairs = zip(actual, wanted, strict=True) if isinstance(actual, tuple) else [(actual, wanted)]
    for a, b in pairs:
        assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} values differ"
    return 0.0
