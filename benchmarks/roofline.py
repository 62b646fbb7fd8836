"""How fast this machine could run a decode step, from two figures of its own.

A step must read the weights that its rows use once, and multiply and add with each of them for
every row. Caches, activations and what calls cost are left out: it is a bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leadline.kernels.packed import LinearWeight
from leadline.models.deepseek_v41.model import DeepseekV41


@dataclass(frozen=True)
class Machine:
    """What was measured, the best of several tries, with the threads that torch has.

    Attributes:
        read: bytes/s of a sum over float32 values that no cache near a core holds.
        multiply: FLOP/s of a float32 matrix product of 1,024 cubed.
    """

    read: float
    multiply: float


def measure_machine() -> Machine:
    """Takes a second."""
    large, square = torch.ones(2**25), torch.ones(1024, 1024)
    return Machine(
        read=large.nbytes / _least_seconds(large.sum),
        multiply=2 * 1024**3 / _least_seconds(lambda: square @ square),
    )


def _least_seconds(function: Any, tries: int = 10) -> float:
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@dataclass(frozen=True)
class StepWeights:
    """Weights of one decode step.

    Attributes:
        dense: values that every row uses.
        experts: values of one routed expert of every layer together.
        num_experts: of a layer.
        per_row: experts of a row.
    """

    dense: int
    experts: int
    num_experts: int
    per_row: int

    @classmethod
    def of(cls, model: DeepseekV41) -> StepWeights:
        """Count the parameters of a model's modules."""
        dense = experts = 0
        for tensor in _parameters([*model.blocks, model.norm, model.head]):
            if tensor.dim() == 3:  # routed experts [E, out, in] ...
                experts += tensor[0].numel()
            else:
                dense += tensor.numel()
        config = model.config
        return cls(dense, experts, config.n_routed_experts, config.num_experts_per_tok)

    def bytes_read(self, rows: int) -> float:
        """Float32; experts are drawn evenly."""
        idle = (1 - self.per_row / self.num_experts) ** rows
        return 4 * (self.dense + self.experts * self.num_experts * (1 - idle))

    def flops(self, rows: int) -> float:
        return 2 * rows * (self.dense + self.experts * self.per_row)


def _parameters(part: Any) -> list[Tensor]:
    """Tensors of a module and of its parts."""
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, LinearWeight):
        return [part.dense]
    if isinstance(part, list):
        return [tensor for item in part for tensor in _parameters(item)]
    if type(part).__module__.startswith("leadline.models"):
        return _parameters(list(vars(part).values()))
    return []  # numbers, and tables of which a row reads a few lines


def tokens_per_second(machine: Machine, weights: StepWeights, rows: int) -> float:
    """The bound on decoding with ``rows`` requests."""
    reading = weights.bytes_read(rows) / machine.read
    multiplying = weights.flops(rows) / machine.multiply
    return rows / max(reading, multiplying)
