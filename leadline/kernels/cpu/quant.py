"""Rounding activations to the grids of number formats."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leadline.kernels.cpu.formats import FP4_32, decode_row, encode_row, round_trip_fp8_row
from leadline.kernels.cpu.jit import F2, array, float32, kernel
from leadline.kernels.reference import quant


@float32(quant.round_trip_fp8_32)
def round_trip_fp8_32(x: Tensor) -> Tensor:
    """To MXFP8 and back, ``[m, n]``."""
    out = torch.empty(x.shape)
    _round_trip_fp8(array(x), out.numpy())
    return out


@float32(quant.round_trip_fp4_32)
def quantize_index_query(q: Tensor) -> Tensor:
    """To MXFP4 and back, ``[m, heads, n]``."""
    out = torch.empty(q.shape)
    width = q.shape[-1]
    _round_trip_fp4(array(q).reshape(-1, width), out.numpy().reshape(-1, width))
    return out


@kernel
def _round_trip_fp8(x: F2, out: F2) -> None:
    for r in range(x.shape[0]):
        round_trip_fp8_row(x[r], out[r])


@kernel
def _round_trip_fp4(x: F2, out: F2) -> None:
    rows, width = x.shape
    values, scales = np.empty(width // 2, np.uint8), np.empty(width // 32, np.uint8)
    for r in range(rows):
        encode_row(x[r], values, scales, FP4_32)
        decode_row(values, scales, FP4_32, out[r])
