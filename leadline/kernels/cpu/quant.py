"""Rounding activations to the grids of number formats."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leadline.kernels.cpu.formats import round_trip_fp8
from leadline.kernels.cpu.jit import F2, in_float32, kernel
from leadline.kernels.reference import quant


@in_float32(quant.round_trip_fp8_32)
def round_trip_fp8_32(x: Tensor) -> Tensor:
    """To MXFP8 and back, ``[m, n]``."""
    return _rounded(x, 32)


@in_float32(quant.round_trip_fp8_row)
def round_trip_fp8_row(x: Tensor) -> Tensor:
    """The same with one scale a row."""
    return _rounded(x, x.shape[1])


def _rounded(x: Tensor, block: int) -> Tensor:
    out = np.empty(x.shape, np.float32)
    _round_trip_fp8(x, block, out)
    return torch.from_numpy(out)


@kernel
def _round_trip_fp8(x: F2, block: int, out: F2) -> None:
    for r in range(x.shape[0]):
        round_trip_fp8(x[r], block, out[r])
