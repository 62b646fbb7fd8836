"""Where a model's weights come from: a checkpoint, or a seed.

Both sources implement ``source.WeightSource``. They differ in where stored tensors come from;
slicing, decoding, checking and the account of what was taken are the same code. What is read goes
to the device as stored, and is checked and decoded there.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leadline.config.families import AnyConfig
from leadline.core.errors import CheckpointError
from leadline.kernels.packed import LinearWeight, PackedWeight, Weight, WeightFormat
from leadline.weights.checkpoint import Checkpoint
from leadline.weights.engram_tables import MappedEngramTable, TableMemory, to_tensor
from leadline.weights.formats import (
    PACKINGS,
    decode,
    magnitude_bounds,
    scale_name,
    scales_of_block32,
)
from leadline.weights.names import model_weights
from leadline.weights.progress import progress_bar
from leadline.weights.random_init import random_bytes, random_tensors
from leadline.weights.source import FULL, EngramTable
from leadline.weights.table import Part, Role, WeightSpec
from leadline.weights.verify import verify

logger = logging.getLogger(__name__)

# The largest magnitude of a matrix lies between these unless it is all zero: trained ones have
# 0.01 to 100. Scale bytes taken for numbers give 1e4 and more, zeroed ones 1e-30 (user-reports E1).
PLAUSIBLE = (1e-10, 1e4)


_CPU = torch.device("cpu")


class _Stored(Protocol):
    """Tensors as files hold them, or on a device."""

    def array(self, name: str) -> npt.NDArray[Any] | Tensor: ...

    def describe(self, name: str) -> str: ...

    def stamp(self, name: str) -> str: ...


class _Source:
    """Slices, decodes and checks stored weights, and keeps account of them."""

    def __init__(
        self,
        stored: _Stored,
        weights: dict[str, WeightSpec],
        formats: dict[str, WeightFormat],
        device: torch.device,
        table_memory: TableMemory | None,
        progress: Any = None,
    ) -> None:
        self._stored = stored
        self._weights = weights
        self._formats = formats
        self._device = device
        self._table_memory = table_memory
        self._progress = progress
        self._taken: Counter[str] = Counter()

    def tensor(self, name: str, dtype: torch.dtype, *, rows: slice = FULL) -> Tensor:
        """A plain tensor, its first dim cut to ``rows``.

        Raises:
            CheckpointError: it holds NaN or infinity.
        """
        assert self._weights[name].format is WeightFormat.PLAIN, f"{name} is packed: use linear()"
        self._taken[name] += 1
        values = self._read(name, (rows,))
        if not values.isfinite().all():
            raise CheckpointError(f"{self._stored.describe(name)} holds NaN or infinity")
        return values.to(dtype)

    def ids(self, name: str) -> Tensor:
        """A table of whole numbers, int64.

        Raises:
            CheckpointError: one is out of range, or comes twice in a row.
        """
        self._taken[name] += 1
        values, below = self._read(name, (FULL,)), self._weights[name].below
        if values.amin() < 0 or values.amax() >= below:
            raise CheckpointError(
                f"{self._stored.describe(name)} has numbers from {int(values.amin())} to "
                f"{int(values.amax())}; they must lie in 0..{below - 1}"
            )
        ascending = values.sort(-1).values
        repeats = (ascending[:, 1:] == ascending[:, :-1]).any(-1)
        if repeats.any():
            row = int(repeats.nonzero()[0])
            raise CheckpointError(
                f"{self._stored.describe(name)} names one expert twice in row {row}: "
                f"{values[row].tolist()}"
            )
        return values

    def linear(
        self,
        name: str,
        dtype: torch.dtype,
        *,
        out: slice = FULL,
        inp: slice = FULL,
        packed: bool = False,
    ) -> Weight:
        """``{name}.weight``: rows ``out`` and columns ``inp`` of ``[out, in]``.

        Left as stored where it has scales and ``packed`` is set, else dequantised. Tiles of 128 x
        128 are told as the tiles of 32 x 32 that kernels know.

        Raises:
            CheckpointError: it holds NaN, or magnitudes that no matrix has.
        """
        weight, index = f"{name}.weight", (out, inp)
        format, input_block = self._formats[weight], self._weights[weight].input_block
        if not packed or format is WeightFormat.PLAIN:
            return LinearWeight(self._matrix(weight, index).to(dtype), format, input_block)
        codes, scales = self._packed(weight, index)
        aligned = format is WeightFormat.FP8_BLOCK128
        if aligned:
            scales, format = scales_of_block32(scales, codes.shape), WeightFormat.FP8_BLOCK32
        return PackedWeight(
            codes, scales, format, dtype=dtype, aligned=aligned, input_block=input_block
        )

    def experts(
        self, prefix: str, which: str, experts: slice, dtype: torch.dtype, *, packed: bool = False
    ) -> Weight:
        """``{prefix}.{e}.{which}.weight`` for each expert of a slice: ``[experts, out, in]``.

        Left as stored where they have scales and ``packed`` is set, else dequantised.

        Raises:
            CheckpointError: as ``linear``, or some experts are packed and others are not.
        """
        names = [f"{prefix}.{e}.{which}.weight" for e in range(experts.start, experts.stop)]
        formats = {self._formats[name] for name in names}
        if len(formats) > 1:
            raise CheckpointError(
                f"{self._stored.describe(names[0])} and the other experts of its layer come in "
                f"different formats: {', '.join(sorted(formats))}"
            )
        spec, (format,) = self._weights[names[0]], formats
        if packed and format is not WeightFormat.PLAIN:
            packing = PACKINGS[format]
            codes, scales = (
                torch.empty(len(names), *part, dtype=torch.uint8, device=self._device)
                for part in (packing.code_shape(spec.shape), packing.scale_shape(spec.shape))
            )
            for expert, name in enumerate(names):
                codes[expert], scales[expert] = self._packed(name, (FULL, FULL))
            return PackedWeight(codes, scales, format, dtype=dtype, input_block=spec.input_block)
        dense = torch.empty(len(names), *spec.shape, dtype=dtype, device=self._device)
        for row, name in zip(dense, names, strict=True):
            row.copy_(self._matrix(name, (FULL, FULL)))
        return LinearWeight(dense, format, spec.input_block)

    def engram_table(self, name: str, dtype: torch.dtype) -> EngramTable:
        """``{name}.weight`` and its scales, gathered by row: on the files, or in host memory.

        Plain values stay on the files: no kernel gathers them.
        """
        weight = f"{name}.weight"
        self._taken[weight] += 1
        codes = self._host_array(weight)
        if self._formats[weight] is WeightFormat.PLAIN:
            return MappedEngramTable(codes, None, dtype)
        scales = self._host_array(scale_name(weight))
        if self._table_memory is None:
            return MappedEngramTable(codes, scales, dtype)
        stamp = self._stored.stamp(weight)
        return self._table_memory.load(weight, codes, scales, dtype, stamp=stamp)

    def finish(self) -> None:
        """Close the progress bar, and assert that one rank took every weight exactly once."""
        if self._progress is not None:
            self._progress.close()
        needed = (n for n, spec in self._weights.items() if spec.role is not Role.IMAGE_ROUTER)
        left = [name for name in needed if name not in self._taken]
        twice = [name for name, count in self._taken.items() if count > 1]
        assert not left, f"{len(left)} weights were never taken, the first is {left[0]}"
        assert not twice, f"{len(twice)} weights were taken twice, the first is {twice[0]}"

    def _matrix(self, name: str, index: tuple[slice, slice]) -> Tensor:
        """Part of a matrix in the type it decodes to (float32, or as stored), checked."""
        format = self._formats[name]
        if format is WeightFormat.PLAIN:
            self._taken[name] += 1
            values = self._read(name, index)
        else:
            values = decode(format, *self._read_packed(name, index))
        self._check_magnitude(name, values)
        return values

    def _packed(self, name: str, index: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
        """Codes and scale bytes of part of a matrix, checked; decoded only if in doubt."""
        format = self._formats[name]
        codes, scales = self._read_packed(name, index)
        bounds = magnitude_bounds(format, codes, scales)
        if bounds is None or bounds[0] < PLAUSIBLE[0] or bounds[1] > PLAUSIBLE[1]:
            self._check_magnitude(name, decode(format, codes, scales))
        return codes, scales

    def _read_packed(self, name: str, index: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
        self._taken[name] += 1
        packing = PACKINGS[self._formats[name]]
        code_cut, scale_cut = packing.cut(self._weights[name].shape, index)
        scales = self._read(scale_name(name), scale_cut)
        return self._read(name, code_cut), scales

    def _check_magnitude(self, name: str, values: Tensor) -> None:
        low, high = (bound.item() for bound in values.aminmax())  # NaN anywhere makes both NaN
        largest = max(-low, high)
        if low != low:
            self._raise_nan(name, values)
        smallest, limit = PLAUSIBLE
        if largest > limit or 0 < largest < smallest:
            raise CheckpointError(
                f"{self._stored.describe(name)} has values up to {largest:.3g}; a weight's largest "
                f"magnitude lies within {smallest:g} and {limit:g}, so its scales are damaged"
            )

    def _raise_nan(self, name: str, values: Tensor) -> None:
        row, col = (int(i) for i in values.isnan().nonzero()[0])
        cause = "a NaN value"
        if self._formats[name] is not WeightFormat.PLAIN:
            cause = f"a NaN code, or the NaN byte 255 in {scale_name(name)}"
        raise CheckpointError(f"{self._stored.describe(name)} holds NaN at [{row}, {col}]: {cause}")

    def _read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A copy of part of a stored tensor, on the device; nothing but that part is touched."""
        part = self._stored.array(name)[index]
        values = part if isinstance(part, Tensor) else to_tensor(np.array(part))
        if self._progress is not None:
            self._progress.update(values.nbytes)
        return values.to(self._device)

    def _host_array(self, name: str) -> npt.NDArray[Any]:
        stored = self._stored.array(name)
        return stored.cpu().numpy() if isinstance(stored, Tensor) else stored


class CheckpointSource(_Source):
    """The backbone weights of a checkpoint.

    The router biases of image tokens must be in the files, but nobody needs to take them yet.

    Args:
        checkpoint: the files.
        config: what they must hold; draft and vision tensors are skipped.
        device: where tensors go, but for Engram tables.
        table_memory: where Engram tables are copied to; None leaves them on the files.
        show_progress: a progress bar in bytes, on a terminal only.

    Raises:
        CheckpointError: see ``verify``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: AnyConfig,
        *,
        device: torch.device = _CPU,
        table_memory: TableMemory | None = None,
        show_progress: bool = True,
    ) -> None:
        contents = verify(checkpoint, config)
        logger.info("%s: %s", checkpoint.path, contents.summary())
        unread_roles = (Role.ENGRAM_TABLE, Role.IMAGE_ROUTER)
        unread = {n for n, spec in contents.weights.items() if spec.role in unread_roles}
        unread |= {scale_name(name) for name in unread}
        to_read = sum(entry.nbytes for entry in contents.used if entry.name not in unread)
        progress = progress_bar(to_read, "Loading weights") if show_progress else None
        super().__init__(
            checkpoint, contents.weights, contents.formats, device, table_memory, progress
        )


class DummySource(_Source):
    """Seeded random weights in the official formats.

    On a CPU they are those that ``tools.random_checkpoint`` writes. On a GPU the bytes themselves
    are drawn, in place: 75 GB take seconds, and are the same on every GPU of a kind.

    Args:
        config: the model.
        seed: of all weights.
        device: where they are made.
        table_memory: as for ``CheckpointSource``.
    """

    def __init__(
        self,
        config: AnyConfig,
        *,
        seed: int = 0,
        device: torch.device = _CPU,
        table_memory: TableMemory | None = None,
    ) -> None:
        weights = {n: s for n, s in model_weights(config).items() if s.part is Part.BACKBONE}
        formats = {name: spec.format for name, spec in weights.items()}
        stored = _RandomTensors(weights, seed, device)
        super().__init__(stored, weights, formats, device, table_memory)


class _RandomTensors:
    """Stored tensors that are made when asked for."""

    def __init__(self, weights: dict[str, WeightSpec], seed: int, device: torch.device) -> None:
        # A scale is asked for by its own name, and made together with its codes.
        self._owners = {scale_name(name): spec for name, spec in weights.items()} | weights
        self._seed = seed
        self._device = device
        self._last: dict[str, Tensor] = {}

    def array(self, name: str) -> npt.NDArray[Any] | Tensor:
        if name not in self._last:
            self._last = {}  # before the next is made: a table can be half of what memory holds
            spec = self._owners[name]
            if self._device.type == "cuda":
                self._last = random_bytes(spec, seed=self._seed, device=self._device)
            else:
                self._last = random_tensors(spec, seed=self._seed)
        tensor = self._last[name]
        if self._device.type == "cuda":
            return tensor
        return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()

    def describe(self, name: str) -> str:
        return f"dummy tensor {name}"

    def stamp(self, name: str) -> str:
        return f"{self._seed} {name} {self._owners[name].shape}"
