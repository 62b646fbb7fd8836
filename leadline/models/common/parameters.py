"""How modules fetch their weights: by official name, this rank's slice, in the right dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.core.errors import CheckpointError, ConfigError
from leadline.kernels.packed import (
    LinearWeight,
    PackedWeight,
    Weight,
    WeightFormat,
    align_scales,
)
from leadline.kernels.registry import REFERENCE
from leadline.parallel.placement import Placement
from leadline.weights.source import FULL, EngramTable, WeightSource


@dataclass(frozen=True, slots=True)
class Parameters:
    """A weight source with the dtypes and the place of the model under construction.

    Attributes:
        dtype: of activations.
        quantize_activations: False drops the MXFP8 rounding in front of packed weights.
        expert_row_scales: in front of routed experts that rounding has one scale a row, see
            ``ops.routed_experts``.
        packed: weights stay as stored, for kernels that expand them where they multiply; else
            they are dequantised at once. The values are the same.
        aligned: what stays packed as FP8 is given coarser scales where that hardly moves it
            (``kernels.packed.align_scales``).
        arrange_experts: what kernels read in place of the stacks ``[E, 2 F, D]`` and ``[E, D, F]``.
        batch_invariant: weights whose products would depend on how many rows there are, are
            refused (``kernels.batch_invariance``).
    """

    source: WeightSource
    dtype: torch.dtype
    device: torch.device
    placement: Placement
    quantize_activations: bool = True
    expert_row_scales: bool = False
    packed: bool = False
    aligned: bool = False
    arrange_experts: Callable[[Weight, Weight], tuple[Weight, Weight]] = REFERENCE.arrange_experts
    batch_invariant: bool = False

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

    def ids(self, name: str) -> Tensor:
        """A table of whole numbers, int32."""
        return self.source.ids(name).int().to(self.device)

    def embedding(self, name: str) -> Tensor:
        """A lookup table in the activation dtype."""
        return self.source.tensor(name, self.dtype).to(self.device)

    def wide_linear(self, *names: str, rows: slice = FULL) -> Tensor:
        """Plain matrices of one wide product, one above the other.

        Wide, or bf16 where weights stay packed and it is exact: half the bytes of the same values.
        """
        wide = torch.cat([self.source.tensor(name, self.wide, rows=rows) for name in names])
        if self.packed and self.dtype == torch.bfloat16:
            narrow = wide.bfloat16()
            wide = narrow if torch.equal(narrow.to(wide.dtype), wide) else wide
        return wide.to(self.device)

    def linear(self, name: str, *, out: slice = FULL, inp: slice = FULL) -> Weight:
        """A matrix ``[out, in]``."""
        weight = self._place(
            self.source.linear(name, self.weight_dtype, out=out, inp=inp, packed=self.packed)
        )
        if not (self.aligned and isinstance(weight, PackedWeight)):
            return weight
        return align_scales(weight) if weight.format is WeightFormat.FP8_BLOCK32 else weight

    def stacked_linear(self, *names: str) -> Weight:
        """Matrices of one input, one above the other."""
        return _stack([self.linear(name) for name in names])

    def grouped_linear(self, name: str, *, groups: int, out: slice = FULL) -> Weight:
        """Rows of a matrix as one matrix per group, ``[groups, out / groups, in]``.

        Its input is never quantised, however it is stored (v41-model 3.8).

        Raises:
            ConfigError: it stays packed, and groups would share scales; or it is plain, and must
                not be.
        """
        weight = self._suits_any_batch(name, self.linear(name, out=out))
        rows = weight.shape[0] // groups
        if isinstance(weight, PackedWeight) and rows % 32:
            raise ConfigError(
                f"{name} has {rows} rows for each of {groups} groups, and kernels that read it as "
                "stored need a multiple of 32; set kernel_backend to 'reference'"
            )
        return _with_exact_input(weight).split(rows)

    def experts(self, prefix: str, *which: str, experts: slice) -> Weight:
        """Expert matrices ``[E, out, in]``, several of them one above the other.

        Raises:
            ConfigError: they are plain, and must not be.
        """
        dtype = self.weight_dtype
        parts = [self.source.experts(prefix, w, experts, dtype, packed=self.packed) for w in which]
        stack = _stack([self._place(part) for part in parts])
        return self._suits_any_batch(prefix, stack)

    def engram_table(self, name: str) -> EngramTable:
        """A table that is gathered from where it lies."""
        return self.source.engram_table(name, self.dtype)

    def _suits_any_batch(self, name: str, weight: Weight) -> Weight:
        if self.batch_invariant and not isinstance(weight, PackedWeight):
            raise ConfigError(
                f"{name} is stored as {weight.format}, and batch_invariant has kernels for several "
                "matrices in one only where they are stored as FP8 or FP4; leave it out"
            )
        return weight

    def _place(self, weight: Weight) -> Weight:
        weight = weight.to(self.device)
        return weight if self.quantize_activations else _with_exact_input(weight)


def _with_exact_input(weight: Weight) -> Weight:
    """The same matrix, whose products take their input as it is."""
    if isinstance(weight, PackedWeight):
        return dataclasses.replace(weight, quantizes_input=False)
    return dataclasses.replace(weight, format=WeightFormat.PLAIN)


def _stack(parts: list[Weight]) -> Weight:
    """Matrices of one input, one above the other."""
    packed = [part for part in parts if isinstance(part, PackedWeight)]
    dense = [part for part in parts if isinstance(part, LinearWeight)]
    formats = {part.format for part in parts}
    if len(formats) > 1 or (packed and dense):
        raise CheckpointError(
            f"matrices of one input come in different formats, {', '.join(sorted(formats))}; "
            "they are multiplied as one and need the same"
        )
    return PackedWeight.stack(packed) if packed else LinearWeight.stack(dense)
