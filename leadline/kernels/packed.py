"""What ops receive besides activations: weights as loaded, and cache tensors as stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from leadline.kernels.records import Record
from leadline.kernels.reference import quant


class WeightFormat(StrEnum):
    """How a matrix ``[out, in]`` is stored in a checkpoint (v41-model 7.2)."""

    PLAIN = "plain"  # bf16 or fp32, no scale
    FP8_BLOCK32 = "fp8_block32"  # e4m3, one UE8M0 byte per 32 x 32 tile
    FP8_BLOCK128 = "fp8_block128"  # e4m3, one UE8M0 byte per 128 x 128 tile (V4)
    MXFP4 = "mxfp4"  # e2m1 pairs along the input, one UE8M0 byte per row and 32 columns
    FP8_ROW32 = "fp8_row32"  # e4m3, one UE8M0 byte per row and 32 columns (Engram tables)


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A matrix ``[out, in]``, or a stack of them ``[experts, out, in]``.

    Attributes:
        dense: the dequantised values in the compute dtype.
        format: how the checkpoint held it; anything but PLAIN means that the input of the
            product is quantised to FP8 first (7.3 of both models).
        input_block: channels that share a scale there, 32 in V4.1 and 128 in V4.
    """

    dense: Tensor
    format: WeightFormat
    input_block: int = 32

    @property
    def quantizes_input(self) -> bool:
        return self.format is not WeightFormat.PLAIN

    @property
    def shape(self) -> torch.Size:
        return self.dense.shape

    def to(self, device: torch.device) -> LinearWeight:
        """The same on a device."""
        return replace(self, dense=self.dense.to(device))

    def split(self, rows: int) -> LinearWeight:
        """A stack of matrices of so many rows, ``[out / rows, rows, in]``."""
        return replace(self, dense=self.dense.unflatten(0, (-1, rows)))

    @staticmethod
    def stack(parts: Sequence[LinearWeight]) -> LinearWeight:
        """One above the other; of one format."""
        return replace(parts[0], dense=torch.cat([part.dense for part in parts], dim=-2))


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix ``[out, in]``, or a stack of them, as stored: kernels expand it where they multiply.

    Attributes:
        codes: ``[.., out, in]`` E4M3 or ``[.., out, in / 2]`` pairs of E2M1, uint8.
        scales: UE8M0 uint8, ``[.., ceil(out / 32), ceil(in / 32)]`` (FP8_BLOCK32) or
            ``[.., out, in / 32]`` (MXFP4).
        format: FP8_BLOCK32 or MXFP4.
        quantizes_input: the input of the product is quantised to FP8 first.
        dtype: of the values that the reference multiplies with.
        aligned: FP8_BLOCK32 whose scales agree over every 128 columns (``align_scales``, and V4's
            tiles of 128 x 128): products may add so many channels before they scale.
        input_block: channels of the input that share a scale, 32 in V4.1 and 128 in V4.
    """

    codes: Tensor
    scales: Tensor
    format: WeightFormat
    quantizes_input: bool = True
    dtype: torch.dtype = torch.bfloat16
    aligned: bool = False
    input_block: int = 32

    @property
    def shape(self) -> torch.Size:
        """Of the values."""
        *leading, width = self.codes.shape
        return torch.Size((*leading, 2 * width if self.format is WeightFormat.MXFP4 else width))

    def to(self, device: torch.device) -> PackedWeight:
        """The same on a device."""
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))

    def split(self, rows: int) -> PackedWeight:
        """A stack of matrices of so many rows, ``[out / rows, rows, in]``.

        Args:
            rows: a multiple of 32 in FP8_BLOCK32, or scales would be shared by two matrices.
        """
        scale_rows = rows // 32 if self.format is WeightFormat.FP8_BLOCK32 else rows
        return replace(
            self,
            codes=self.codes.unflatten(0, (-1, rows)),
            scales=self.scales.unflatten(0, (-1, scale_rows)),
        )

    @staticmethod
    def stack(parts: Sequence[PackedWeight]) -> PackedWeight:
        """One above the other; of one format, and of whole tiles."""
        return replace(
            parts[0],
            codes=torch.cat([part.codes for part in parts], dim=-2),
            scales=torch.cat([part.scales for part in parts], dim=-2),
            aligned=all(part.aligned for part in parts),
        )

    @property
    def dense(self) -> Tensor:
        """The dequantised values, made anew at each call: exact in bf16."""
        if self.format is WeightFormat.MXFP4:
            return quant.dequantize_fp4_32(self.codes, self.scales).to(self.dtype)
        return quant.dequantize_fp8_block(self.codes, self.scales).to(self.dtype)


ALIGNMENT_LOSS = 1e-3
"""Of a matrix whose scales are aligned, at most: the norm of the change over the matrix's own."""


def align_scales(weight: PackedWeight) -> PackedWeight:
    """The matrix with one scale for 32 rows and 128 columns, if it stays nearly the same.

    Tiles take the largest scale of their four, and their codes shrink by what they gain: exactly,
    but for magnitudes far below the largest of the four (kernels.md 11.3). Without the property
    where that loses more than ``ALIGNMENT_LOSS``.

    Args:
        weight: FP8_BLOCK32, as a rank multiplies with it.
    """
    *leading, rows, columns = weight.scales.shape
    height, width = weight.codes.shape[-2:]
    tiles = pad(weight.codes, (0, -width % 32, 0, -height % 32))
    tiles = tiles.unflatten(-1, (columns, 32)).unflatten(-3, (rows, 32)).transpose(-3, -2)
    values = quant.decode_e4m3(tiles)
    exponents = weight.scales.int()
    counted = torch.where((tiles & 0x7F != 0).flatten(-2).any(-1), exponents, 0)
    fours = pad(counted, (0, -columns % 4)).unflatten(-1, (-1, 4)).amax(-1, keepdim=True)
    common = fours.expand(*leading, rows, -1, 4).flatten(-2)[..., :columns]
    shrunken = values * torch.exp2((exponents - common).clamp(max=0).float())[..., None, None]
    codes = quant.encode_e4m3(shrunken)
    scale = quant.decode_ue8m0(common.to(torch.uint8))[..., None, None]
    change = ((quant.decode_e4m3(codes) - shrunken) * scale).norm()
    if change > ALIGNMENT_LOSS * (shrunken * scale).norm():
        return weight
    codes = codes.transpose(-3, -2).flatten(-2).flatten(-3, -2)[..., :height, :width]
    return replace(
        weight, codes=codes.contiguous(), scales=common.to(torch.uint8).contiguous(), aligned=True
    )


Weight = LinearWeight | PackedWeight
"""What products take."""


@dataclass(frozen=True, slots=True)
class RecordField:
    """One cache tensor: rows of ``n`` channels at ``[outer, inner]`` (page and entry, or slot and
    ring row), values and scales being views of the same bytes.

    Attributes:
        values: ``[outer, inner, bytes]`` uint8, or ``[outer, inner, n]`` of a plain dtype.
        scales: ``[outer, inner, bytes]`` uint8, or None for plain records.
        rotary: channels at the end of a row that FP8_64 keeps in bf16; 0 in other records.
    """

    record: Record
    values: Tensor
    scales: Tensor | None
    rotary: int = 0

    def gather(self, outer: Tensor, inner: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows at these addresses as they are stored: values, and scales of packed records."""
        scales = None if self.scales is None else self.scales[outer, inner]
        return self.values[outer, inner], scales
