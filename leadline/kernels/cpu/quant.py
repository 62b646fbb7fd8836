"""Rounding activations to the grids of number formats."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leadline.kernels.cpu.formats import round_trip_fp8
from leadline.kernels.cpu.jit import F2, in_float32, kernel
from leadline.kernels.reference import quant


@in_float32(quant.round_trip_fp8)
def round_rows_fp8(x: Tensor, block: int) -> Tensor:
    """To E4M3 and back, ``[m, n]``, with a scale for so many channels."""
    out = np.empty(x.shape, np.float32)
    _round_trip_fp8(x, block, out)
    return torch.from_numpy(out)


@kernel
def _round_trip_fp8(x: F2, block: int, out: F2) -> None:
    for r in range(x.shape[0]):
        round_trip_fp8(x[r], block, out[r])
