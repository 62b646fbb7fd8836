"""How modules fetch their weights: by official name, this rank's slice, in the right dtype."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.core.errors import CheckpointError
from leadline.kernels.packed import LinearWeight, WeightFormat
from leadline.parallel.placement import Placement
from leadline.weights.source import FULL, EngramTable, WeightSource


@dataclass(frozen=True, slots=True)
class Parameters:
    """A weight source with the dtypes and the place of the model under construction.

    Attributes:
        dtype: of activations.
        quantize_activations: False drops the MXFP8 rounding in front of packed weights.
    """

    source: WeightSource
    dtype: torch.dtype
    device: torch.device
    placement: Placement
    quantize_activations: bool = True

    @property
    def wide(self) -> torch.dtype:
        """Accumulation dtype: what v41-model 9.1 lists is kept in it."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of dense matrices; a CPU multiplies and adds in float32 or wider."""
        return self.wide if self.device.type == "cpu" else self.dtype

    def tensor(self, name: str, *, rows: slice = FULL) -> Tensor:
        """A plain tensor, wide."""
        return self.source.tensor(name, self.wide, rows=rows).to(self.device)

    def embedding(self, name: str) -> Tensor:
        """A lookup table in the activation dtype."""
        return self.source.tensor(name, self.dtype).to(self.device)

    def linear(self, name: str, *, out: slice = FULL, inp: slice = FULL) -> LinearWeight:
        """A matrix ``[out, in]``."""
        return self._place(self.source.linear(name, self.weight_dtype, out=out, inp=inp))

    def stacked_linear(self, *names: str) -> LinearWeight:
        """Matrices of one input, one above the other."""
        return self._stack([self.linear(name) for name in names], dim=0)

    def experts(self, prefix: str, *which: str, experts: slice) -> LinearWeight:
        """Expert matrices ``[E, out, in]``, several of them one above the other."""
        parts = [self.source.experts(prefix, w, experts, self.weight_dtype) for w in which]
        return self._stack([self._place(part) for part in parts], dim=1)

    def engram_table(self, name: str) -> EngramTable:
        """A table that stays where it is."""
        return self.source.engram_table(name, self.dtype)

    def _place(self, weight: LinearWeight) -> LinearWeight:
        kept = weight.format if self.quantize_activations else WeightFormat.PLAIN
        return dataclasses.replace(weight, dense=weight.dense.to(self.device), format=kept)

    @staticmethod
    def _stack(parts: list[LinearWeight], *, dim: int) -> LinearWeight:
        if len(parts) == 1:
            return parts[0]
        formats = {part.format for part in parts}
        if len(formats) > 1:
            raise CheckpointError(
                f"w1 and w3 of an expert come in different formats, {', '.join(sorted(formats))}; "
                "they are multiplied as one matrix and need the same"
            )
        return dataclasses.replace(parts[0], dense=torch.cat([p.dense for p in parts], dim=dim))
