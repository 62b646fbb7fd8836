"""``--debug-nonfinite``: name the first op whose output is not finite, instead of a late victim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leadline.core.errors import LeadlineError

# Scores of entries that a row cannot see are -inf on purpose.
_MASKED = {"index_logits", "candidate_logits"}


class NonFiniteError(LeadlineError):
    """An op produced NaN or infinity.

    Attributes:
        op: the op's name in ``kernels.ops``.
        row: first index of its output that is affected, usually a row of the step.
        layer: the model's layer, filled in on the way up.
    """

    def __init__(self, op: str, row: int, layer: int | None = None) -> None:
        where = "" if layer is None else f" in layer {layer}"
        super().__init__(f"op {op}{where} gave a non-finite value in row {row}")
        self.op, self.row, self.layer = op, row, layer


class _Switch:
    """Set once at start, like the choice of backend."""

    enabled = False


switch = _Switch()


def check(name: str, result: Any) -> None:
    """Look at every floating result of an op.

    Raises:
        NonFiniteError: one holds NaN or infinity.
    """
    for tensor in result if isinstance(result, tuple) else (result,):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.numel():
            continue
        bad = ~tensor.isfinite() & (tensor != -torch.inf if name in _MASKED else True)
        if bad.any():
            raise NonFiniteError(name, int(bad.flatten(1).any(1).nonzero()[0]))
