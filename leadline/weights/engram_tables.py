"""Engram tables: rows gathered from where they lie, on the checkpoint's files or in host memory.

The official tables are 203 GB. Of a memory-mapped one, only the pages of the gathered rows are
read; the operating system keeps the hot ones. One in host memory is copied there once, and a GPU's
kernel reads its rows over the bus, so that no step waits for the host.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leadline.kernels import ops
from leadline.kernels.packed import WeightFormat
from leadline.weights.formats import decode
from leadline.weights.host_memory import GB, HostMemory, shared_memory

logger = logging.getLogger(__name__)


class MappedEngramTable:
    """A table on a memory-mapped file (``source.EngramTable``), which the host gathers.

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


class MemoryEngramTable:
    """A packed table in host memory (``source.EngramTable``), gathered by ``ops.gather_rows``.

    Args:
        codes: ``[rows, head_dim]`` E4M3 as uint8; for a GPU in registered memory.
        scales: ``[rows, head_dim / 32]`` UE8M0.
        dtype: of gathered rows; every value is exact in bf16.
    """

    waits_for_host = False

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self._codes = codes
        self._scales = scales
        self._dtype = dtype

    @property
    def num_rows(self) -> int:
        return len(self._codes)

    def gather(self, rows: Tensor) -> Tensor:
        """Rows ``[...]`` int64 of the table -> their values ``[..., head_dim]``, where rows are."""
        return ops.gather_rows(self._codes, self._scales, rows).to(self._dtype)


@dataclass(frozen=True, slots=True)
class TableMemory:
    """How tables come into host memory.

    Attributes:
        device: of the rows; a GPU has the memory registered.
        folder: on a file system in memory, where the processes of a host share tables; None is
            memory of this process.
    """

    device: torch.device
    folder: Path | None = None

    def load(
        self,
        name: str,
        codes: npt.NDArray[Any],
        scales: npt.NDArray[Any],
        dtype: torch.dtype,
        *,
        stamp: str,
    ) -> MemoryEngramTable:
        """Copy a packed table, or find the copy of another process.

        Args:
            name: of the tensor, for people.
            codes: as for ``MappedEngramTable``.
            scales: likewise.
            dtype: of gathered rows.
            stamp: tells the table from all others that processes may share.

        Raises:
            ConfigError: memory does not suffice, or the driver does not register it.
        """
        start = time.perf_counter()
        parts = (codes, scales)
        if self.folder is None:
            memory = HostMemory(codes.nbytes + scales.nbytes)
            memory.fill(parts, f"Loading {name}")
        else:
            digest = hashlib.sha256(stamp.encode()).hexdigest()[:16]
            file = self.folder / f"leadline-engram-{digest}.table"
            memory = shared_memory(file, parts, f"Loading {name}")
        loaded = time.perf_counter()
        if self.device.type == "cuda":
            memory.register()
        registered = time.perf_counter()
        logger.info(
            "%s: %.1f GB in %s, %.0f %% in huge pages; loaded in %.1f s, registered in %.1f s",
            name,
            memory.nbytes / GB,
            "memory" if self.folder is None else file,
            100 * memory.huge_share(),
            loaded - start,
            registered - loaded,
        )
        # A row's codes and scales lie side by side, so that one translation of an address serves
        # both: half as fast again (benchmarks/engram_lookup.py).
        records = torch.from_numpy(memory.bytes).view(len(codes), -1)
        width = codes.shape[1]
        return MemoryEngramTable(records[:, :width], records[:, width:], dtype)


def to_tensor(stored: npt.NDArray[Any]) -> Tensor:
    """An array as ``checkpoint`` stores it -> a tensor: uint16 is bf16, int8 is packed uint8."""
    tensor = torch.from_numpy(stored)
    if stored.dtype == np.uint16:
        return tensor.view(torch.bfloat16)
    return tensor.view(torch.uint8) if stored.dtype == np.int8 else tensor
