"""Seeded random weights in the official formats, for tests and for runs without files.

A weight depends on the seed and on its own name only: not on the order of asking, on the other
weights, or on how a checkpoint is cut into shards.
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from leadline.kernels.packed import WeightFormat
from leadline.weights.formats import PACKINGS, encode, scale_name
from leadline.weights.table import Role, WeightSpec

_UE8M0_BIAS = 127
_TILE = 32  # values of one level, along both sides, where scales do not have larger blocks
# Root mean square of uniform codes: of E2M1, and of E4M3 below 2.
_CODE_RMS = {
    WeightFormat.MXFP4: 2.93,
    WeightFormat.FP8_BLOCK32: 0.6,
    WeightFormat.FP8_BLOCK128: 0.6,
    WeightFormat.FP8_ROW32: 0.6,
}

# Values made at a time: bounds what large tables need on top of their packed bytes.
_CHUNK_VALUES = 1 << 24


def random_tensors(spec: WeightSpec, *, seed: int, plain: bool = False) -> dict[str, Tensor]:
    """One weight as the tensors of a checkpoint, by name.

    Codes and scales are raw uint8 bytes; plain values are bf16, fp32 or int64.

    Args:
        spec: the weight.
        seed: of the whole model.
        plain: leave packed formats out: bf16 ``[out, in]`` without a scale.
    """
    draws = _HostDraws(np.random.default_rng(_seed_of(spec, seed)))
    if plain or spec.format is WeightFormat.PLAIN:
        return {spec.name: _plain_values(spec, draws).to(_dtype_of(spec))}
    packing = PACKINGS[spec.format]
    codes = torch.empty(packing.code_shape(spec.shape), dtype=torch.uint8)
    scales = torch.empty(packing.scale_shape(spec.shape), dtype=torch.uint8)
    rows, cols = spec.shape
    tile = max(_TILE, packing.block[0])
    step = max(tile, _CHUNK_VALUES // cols // tile * tile)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        values = _matrix_values((part.stop - start, cols), draws, tile)
        code_cut, scale_cut = packing.cut(spec.shape, (part, slice(None)))
        codes[code_cut], scales[scale_cut] = encode(spec.format, values)
    return {spec.name: codes, scale_name(spec.name): scales}


def random_bytes(spec: WeightSpec, *, seed: int, device: torch.device) -> dict[str, Tensor]:
    """As ``random_tensors``, drawn where they are to stay, and packed ones as bytes.

    Codes are uniform: of E4M3 those below 2 in magnitude, of E2M1 all. Their scales bring a matrix
    to the magnitude of ``random_tensors``; other values than those, and other on another device.
    """
    draws = _DeviceDraws(torch.Generator(device).manual_seed(_seed_of(spec, seed)))
    if spec.format is WeightFormat.PLAIN:
        return {spec.name: _plain_values(spec, draws).to(_dtype_of(spec))}
    packing = PACKINGS[spec.format]
    codes = draws.integers(0, 256, packing.code_shape(spec.shape)).to(torch.uint8)
    if spec.format is not WeightFormat.MXFP4:
        codes &= 0xBF  # without the exponent's highest bit there is no NaN either
    exponent = round(math.log2(_size_of(spec.shape[1]) / _CODE_RMS[spec.format]))
    level = _UE8M0_BIAS + exponent
    scales = draws.integers(level - 1, level + 2, packing.scale_shape(spec.shape)).to(torch.uint8)
    return {spec.name: codes, scale_name(spec.name): scales}


def _seed_of(spec: WeightSpec, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _dtype_of(spec: WeightSpec) -> torch.dtype:
    return {"F32": torch.float32, "I64": torch.int64}.get(spec.dtype, torch.bfloat16)


def _size_of(cols: int) -> float:
    """What the values of a matrix deviate by."""
    return min(0.05, 1 / math.sqrt(cols))


def _matrix_values(shape: tuple[int, ...], draws: _Draws, tile: int = _TILE) -> Tensor:
    """N(0, s) with s about 0.05, or less for wide inputs, and a level of its own per tile.

    The level (2^-2 .. 2^1) makes neighbouring scales differ, as those of trained weights do.
    """
    rows, cols = shape
    values = draws.normal(shape) * _size_of(cols)
    tiles = draws.integers(-2, 2, (-(-rows // tile), -(-cols // tile)))
    levels = torch.exp2(tiles.float()).repeat_interleave(tile, 0).repeat_interleave(tile, 1)
    return values * levels[:rows, :cols]


def _plain_values(spec: WeightSpec, draws: _Draws) -> Tensor:
    """float32 values of the magnitudes that v41-model section 11 suggests, by what they are."""
    if spec.dtype == "I64":
        return _different_ids(spec, draws)
    normal = draws.normal(spec.shape)
    name = spec.name
    if name.endswith("attn_sink"):
        return normal
    if name.endswith(("gate.bias", "gate.bias_vl")):
        return normal * 0.1
    if spec.role is Role.NORM or name.endswith(("norm.weight", "q_weight", "k_weight")):
        return 1 + normal * 0.05
    if name.endswith("_scale"):
        return draws.uniform(spec.shape) + 0.5
    if name.endswith(("_base", ".ape")):
        return normal * 0.5
    if name.endswith("_fn"):
        return normal * min(0.02, 1 / math.sqrt(spec.shape[1]))
    return _matrix_values(spec.shape, draws)


def _different_ids(spec: WeightSpec, draws: _Draws) -> Tensor:
    """Rows of whole numbers that follow each other, from anywhere, in a circle."""
    rows, cols = spec.shape
    start = (draws.uniform((rows, 1)) * spec.below).floor()
    return (start + torch.arange(cols, device=start.device)) % spec.below


class _Draws(Protocol):
    """Random numbers of one weight: float32, and integers from ``low`` up to below ``high``."""

    def normal(self, shape: tuple[int, ...]) -> Tensor: ...

    def uniform(self, shape: tuple[int, ...]) -> Tensor: ...

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor: ...


class _HostDraws:
    """NumPy's, because torch draws other normal values on a CPU with other vector units."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(self._generator.standard_normal(shape, dtype=np.float32))

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(self._generator.random(shape, dtype=np.float32))

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(self._generator.integers(low, high, shape))


class _DeviceDraws:
    """torch's; integers are bytes."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._generator.device)

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self._generator.device)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(
            low,
            high,
            shape,
            generator=self._generator,
            device=self._generator.device,
            dtype=torch.int8 if low < 0 else torch.uint8,
        )
