"""Seeded random weights in the official formats, for tests and for runs without files.

A weight depends on the seed and on its own name only: not on the order of asking, on the other
weights, or on how a checkpoint is cut into shards.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from leadline.kernels.packed import WeightFormat
from leadline.weights.formats import PACKINGS, encode, scale_name
from leadline.weights.names import Role, WeightSpec

# Values made at a time: bounds what large tables need on top of their packed bytes.
_CHUNK_VALUES = 1 << 24


def random_tensors(spec: WeightSpec, *, seed: int, plain: bool = False) -> dict[str, Tensor]:
    """One weight as the tensors of a checkpoint, by name.

    Codes and scales are raw uint8 bytes; plain values are bf16 or fp32.

    Args:
        spec: the weight.
        seed: of the whole model.
        plain: leave packed formats out: bf16 ``[out, in]`` without a scale.
    """
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    # NumPy's, because torch draws other normal values on a CPU with other vector units.
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    if plain or spec.format is WeightFormat.PLAIN:
        dtype = torch.float32 if spec.dtype == "F32" else torch.bfloat16
        return {spec.name: _plain_values(spec, generator).to(dtype)}
    packing = PACKINGS[spec.format]
    codes = torch.empty(packing.code_shape(spec.shape), dtype=torch.uint8)
    scales = torch.empty(packing.scale_shape(spec.shape), dtype=torch.uint8)
    rows, cols = spec.shape
    step = max(32, _CHUNK_VALUES // cols // 32 * 32)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        values = _matrix_values((part.stop - start, cols), generator)
        code_cut, scale_cut = packing.cut(spec.shape, (part, slice(None)))
        codes[code_cut], scales[scale_cut] = encode(spec.format, values)
    return {spec.name: codes, scale_name(spec.name): scales}


def _matrix_values(shape: tuple[int, ...], generator: np.random.Generator) -> Tensor:
    """N(0, s) with s about 0.05, or less for wide inputs, and a level of its own per tile.

    The level (2^-2 .. 2^1) makes neighbouring scales differ, as those of trained weights do.
    """
    rows, cols = shape
    values = _normal(shape, generator) * min(0.05, 1 / math.sqrt(cols))
    tiles = torch.from_numpy(generator.integers(-2, 2, (-(-rows // 32), -(-cols // 32))))
    levels = torch.exp2(tiles.float()).repeat_interleave(32, 0).repeat_interleave(32, 1)
    return values * levels[:rows, :cols]


def _plain_values(spec: WeightSpec, generator: np.random.Generator) -> Tensor:
    """float32 values of the magnitudes that v41-model section 11 suggests, by what they are."""
    normal = _normal(spec.shape, generator)
    name = spec.name
    if name.endswith("attn_sink"):
        return normal
    if name.endswith(("gate.bias", "gate.bias_vl")):
        return normal * 0.1
    if spec.role is Role.NORM or name.endswith(("norm.weight", "q_weight", "k_weight")):
        return 1 + normal * 0.05
    if name.endswith("_scale"):
        return torch.from_numpy(generator.random(spec.shape, dtype=np.float32)) + 0.5
    if name.endswith("_base"):
        return normal * 0.5
    if name.endswith("_fn"):
        return normal * min(0.02, 1 / math.sqrt(spec.shape[1]))
    return _matrix_values(spec.shape, generator)


def _normal(shape: tuple[int, ...], generator: np.random.Generator) -> Tensor:
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
