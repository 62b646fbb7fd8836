"""How one cache row is stored: sizes only, so that the scheduler's side needs no torch."""

from __future__ import annotations

from enum import StrEnum


class Record(StrEnum):
    """A row of ``n`` channels in memory (v41-model section 4, kernels.md 0.2)."""

    FP8_32 = "fp8_32"  # e4m3 codes, then one UE8M0 byte per 32 channels
    FP4_16 = "fp4_16"  # e2m1 pairs, then one e4m3 scale byte per 16 channels
    FP4_32 = "fp4_32"  # e2m1 pairs and one UE8M0 byte per 32; a page holds values, then scales
    FP8_64 = "fp8_64"  # V4: e4m3 but for rotary channels in bf16, one UE8M0 byte per 64; as FP4_32
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def scales_last(self) -> bool:
        """Whether a page or ring holds all values, then all scales; else each row has its own."""
        return self in (Record.FP4_32, Record.FP8_64)

    def value_bytes(self, channels: int, rotary: int = 0) -> int:
        """Bytes of the values of one row, without scales.

        Args:
            channels: of the row.
            rotary: how many of them, the last, are rotated; only FP8_64 stores these otherwise.
        """
        match self:
            case Record.FP8_32:
                return channels
            case Record.FP8_64:
                return channels + rotary
            case Record.FP4_16 | Record.FP4_32:
                return channels // 2
            case Record.BFLOAT16:
                return 2 * channels
            case Record.FLOAT32:
                return 4 * channels

    def scale_bytes(self, channels: int, rotary: int = 0) -> int:
        """Bytes of the scales of one row; 0 for plain values."""
        match self:
            case Record.FP8_64:  # padded, so that the scales of a row are aligned
                return -(-(channels - rotary) // 64 // 8) * 8
            case Record.FP8_32 | Record.FP4_32:
                return channels // 32
            case Record.FP4_16:
                return channels // 16
            case _:
                return 0

    def num_bytes(self, channels: int, rotary: int = 0) -> int:
        """Bytes of one whole row."""
        return self.value_bytes(channels, rotary) + self.scale_bytes(channels, rotary)
