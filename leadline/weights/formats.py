"""Packed weight formats as one table: shapes on disk, decoding, encoding (7.2 of both models)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from leadline.core.errors import ConfigError
from leadline.kernels.packed import WeightFormat
from leadline.kernels.reference import quant

# Scales are UE8M0 everywhere: byte e means 2^(e - 127). They are handled as raw uint8 bytes and
# become numbers in one place only, ``quant.decode_ue8m0``.
SCALE_DTYPE = "F8_E8M0"


Cut = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """How a matrix ``[out, in]`` lies in a file.

    Attributes:
        code_dtype: safetensors type of the codes.
        values_per_code: matrix entries in one stored element, along the input.
        block: (rows, columns) of the matrix that share one scale.
        magnitudes: the smallest of a code but 0, and the largest.
    """

    code_dtype: str
    values_per_code: int
    block: tuple[int, int]
    magnitudes: tuple[float, float]

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Stored shape of the codes of a matrix ``shape``."""
        rows, cols = shape
        return rows, cols // self.values_per_code

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a matrix ``shape``; blocks at the edge may be partial."""
        return tuple(-(-size // step) for size, step in zip(shape, self.block, strict=True))

    def cut(self, shape: tuple[int, ...], index: tuple[slice, slice]) -> tuple[Cut, Cut]:
        """Where the part ``index`` of a matrix ``shape`` lies: in its codes and in its scales.

        Raises:
            ConfigError: the part begins or ends inside a block.
        """
        codes, scales = [], []
        widths = (1, self.values_per_code)
        for size, part, step, width in zip(shape, index, self.block, widths, strict=True):
            start, stop, _ = part.indices(size)
            if start % step or (stop % step and stop != size):
                raise ConfigError(
                    f"a weight {list(shape)} with scale blocks of {step} cannot be cut at "
                    f"{start}:{stop}; use fewer ranks"
                )
            codes.append(slice(start // width, stop // width))
            scales.append(slice(start // step, -(-stop // step)))
        return tuple(codes), tuple(scales)


_E4M3 = (2.0**-9, quant.E4M3_MAX)
PACKINGS: dict[WeightFormat, Packing] = {
    WeightFormat.FP8_BLOCK32: Packing("F8_E4M3", 1, (32, 32), _E4M3),
    WeightFormat.FP8_BLOCK128: Packing("F8_E4M3", 1, (128, 128), _E4M3),
    WeightFormat.MXFP4: Packing("I8", 2, (1, 32), (0.5, quant.E2M1_MAX)),
    WeightFormat.FP8_ROW32: Packing("F8_E4M3", 1, (1, 32), _E4M3),
}


def scale_name(weight_name: str) -> str:
    """The scale's tensor name: ``X.weight`` -> ``X.scale``."""
    return weight_name.removesuffix(".weight") + ".scale"


def decode(format: WeightFormat, codes: Tensor, scales: Tensor) -> Tensor:
    """Codes and scale bytes, uint8 -> the exact values, float32 ``[..., out, in]``."""
    match format:
        case WeightFormat.FP8_BLOCK32 | WeightFormat.FP8_BLOCK128:
            return quant.dequantize_fp8_block(codes, scales, block=PACKINGS[format].block[0])
        case WeightFormat.MXFP4:
            return quant.dequantize_fp4_32(codes, scales)
        case WeightFormat.FP8_ROW32:
            return quant.dequantize_fp8_32(codes, scales)
        case WeightFormat.PLAIN:
            raise ValueError("a plain weight has nothing to decode")


def scales_of_block32(scales: Tensor, shape: Sequence[int]) -> Tensor:
    """Scales of 128 x 128 tiles as those of the 32 x 32 tiles in them, of a matrix ``shape``."""
    rows, cols = PACKINGS[WeightFormat.FP8_BLOCK32].scale_shape(tuple(shape))
    return scales.repeat_interleave(4, 0).repeat_interleave(4, 1)[:rows, :cols].contiguous()


def magnitude_bounds(
    format: WeightFormat, codes: Tensor, scales: Tensor
) -> tuple[float, float] | None:
    """Between which every value but 0 lies in magnitude; None if one is NaN.

    From the extreme scales, which is quicker than decoding.
    """
    extremes = torch.stack(scales.aminmax())
    has_nan_code = format is not WeightFormat.MXFP4 and (codes & 0x7F).max() == 0x7F
    if has_nan_code or extremes[1] == 255:
        return None
    low, high = quant.decode_ue8m0(extremes).tolist()
    smallest, largest = PACKINGS[format].magnitudes
    return low * smallest, high * largest


def encode(format: WeightFormat, values: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 ``[..., out, in]`` -> the nearest codes and scale bytes, uint8.

    A block's scale is the smallest power of two that lets its largest value fit.
    """
    match format:
        case WeightFormat.FP8_BLOCK32 | WeightFormat.FP8_BLOCK128:
            return _encode_fp8_block(values, PACKINGS[format].block[0])
        case WeightFormat.MXFP4:
            return quant.quantize_fp4_32(values)
        case WeightFormat.FP8_ROW32:
            return quant.quantize_fp8_32(values)
        case WeightFormat.PLAIN:
            raise ValueError("a plain weight has no codes")


def _encode_fp8_block(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    rows, cols = values.shape[-2:]
    padded = F.pad(values, (0, -cols % block, 0, -rows % block))
    # [..., R, block, C, block]
    tiles = padded.unflatten(-1, (-1, block)).unflatten(-3, (-1, block))
    amax = tiles.abs().amax((-3, -1)).clamp(min=1e-4)
    scales = quant.encode_ue8m0(amax / quant.E4M3_MAX)
    codes = quant.encode_e4m3(tiles / quant.decode_ue8m0(scales)[..., :, None, :, None])
    return codes.flatten(-2).flatten(-3, -2)[..., :rows, :cols].contiguous(), scales
