"""Engram tables: rows gathered from where they lie, never copied or scanned whole.

The official tables are 203 GB. Of a memory-mapped one, only the pages of the gathered rows are
read; the operating system keeps the hot ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leadline.kernels.packed import WeightFormat
from leadline.weights.formats import decode


class HostEngramTable:
    """A table in host memory or on a memory-mapped file (``source.EngramTable``).

    Args:
        codes: ``[rows, head_dim]``: FP8 codes as uint8, or plain values as float32 or as bf16
            bits in uint16.
        scales: ``[rows, head_dim / 32]`` UE8M0 bytes for codes, None for plain values.
        dtype: of gathered rows; every value is exact in bf16.
    """

    waits_for_host = True

    def __init__(
        self, codes: npt.NDArray[Any], scales: npt.NDArray[Any] | None, dtype: torch.dtype
    ) -> None:
        self._codes = codes
        self._scales = scales
        self._dtype = dtype

    @property
    def num_rows(self) -> int:
        return int(self._codes.shape[0])

    def gather(self, rows: Tensor) -> Tensor:
        """Rows ``[...]`` int64 -> their values ``[..., head_dim]``, on the device of ``rows``.

        Raises:
            IndexError: a row lies outside the table.
        """
        index = rows.cpu().numpy()
        if index.size and not (index.min() >= 0 and index.max() < self.num_rows):
            raise IndexError(
                f"engram rows {index.min()}..{index.max()} reach outside the table's "
                f"{self.num_rows} rows"
            )
        values = to_tensor(self._codes[index])
        if self._scales is not None:
            values = decode(WeightFormat.FP8_ROW32, values, to_tensor(self._scales[index]))
        return values.to(device=rows.device, dtype=self._dtype)


def to_tensor(stored: npt.NDArray[Any]) -> Tensor:
    """An array as ``checkpoint`` stores it -> a tensor: uint16 is bf16, int8 is packed uint8."""
    tensor = torch.from_numpy(stored)
    if stored.dtype == np.uint16:
        return tensor.view(torch.bfloat16)
    return tensor.view(torch.uint8) if stored.dtype == np.int8 else tensor
