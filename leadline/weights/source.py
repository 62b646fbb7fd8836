"""``WeightSource``: what a model asks for while it builds itself."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from leadline.kernels.packed import Weight

FULL = slice(None)


class EngramTable(Protocol):
    """An n-gram table that stays packed where it lies and is gathered by row.

    Attributes:
        waits_for_host: whether the host gathers, so that no graph of a GPU can hold it.
    """

    @property
    def waits_for_host(self) -> bool: ...

    @property
    def num_rows(self) -> int: ...

    def gather(self, rows: Tensor) -> Tensor:
        """Rows ``[...]`` int64 -> dequantised values ``[..., engram_head_dim]``, where rows are.

        They are exact. The host waits only for tables that the device cannot read.
        """
        ...


class WeightSource(Protocol):
    """Hands out tensors by official name and keeps account of every one.

    Implementations: ``weights.load.CheckpointSource`` (files) and ``weights.load.DummySource``
    (seeded random values in the official formats, no files).
    """

    def tensor(self, name: str, dtype: torch.dtype, *, rows: slice = FULL) -> Tensor:
        """A plain tensor (norm, bias, ``hc_*``, embedding ...), cut along its first dim."""
        ...

    def ids(self, name: str) -> Tensor:
        """A table of whole numbers, int64: in each row different ones, all in their range."""
        ...

    def linear(
        self,
        name: str,
        dtype: torch.dtype,
        *,
        out: slice = FULL,
        inp: slice = FULL,
        packed: bool = False,
    ) -> Weight:
        """``{name}.weight`` with its ``.scale`` if there is one: ``[out, in]``.

        With ``packed`` a matrix that has scales stays as stored, a ``PackedWeight``.
        """
        ...

    def experts(
        self, prefix: str, which: str, experts: slice, dtype: torch.dtype, *, packed: bool = False
    ) -> Weight:
        """``{prefix}.{e}.{which}`` for the experts of a slice, stacked: ``[E, out, in]``."""
        ...

    def engram_table(self, name: str, dtype: torch.dtype) -> EngramTable:
        """``{name}.weight`` and ``.scale`` as a table that no device holds."""
        ...
