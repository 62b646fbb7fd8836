"""Number formats: the golden bytes, and the edges that the golden files lack."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from leadline.kernels.reference import quant as q

Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]
Dequantizer = Callable[[Tensor, Tensor], Tensor]

# name: (quantise, dequantise, channels a scale)
FORMATS: dict[str, tuple[Quantizer, Dequantizer, int]] = {
    "fp8_32": (q.quantize_fp8_32, q.dequantize_fp8_32, 32),
    "fp8_64": (q.quantize_fp8_64, q.dequantize_fp8_64, 64),
    "fp4_16": (q.quantize_fp4_16, q.dequantize_fp4_16, 16),
    "fp4_32": (q.quantize_fp4_32, q.dequantize_fp4_32, 32),
}
every_format = pytest.mark.parametrize("name", FORMATS)
E4M3_GRID = [*range(127)]  # codes of the finite magnitudes


def rows_over_octaves(rows: int, channels: int) -> Tensor:
    """Normal values, every 16 channels at a level of their own between 2^-30 and 2^10."""
    levels = torch.randint(-30, 11, (rows, channels // 16)).float().exp2()
    return torch.randn(rows, channels) * levels.repeat_interleave(16, 1)


def nearest_even(x: Tensor, grid: Tensor) -> Tensor:
    """Index of the grid value nearest to each ``|x|``; of two equally near, the even index."""
    distance = (x.double().abs().unsqueeze(-1) - grid.double()).abs()
    odd = torch.arange(len(grid)) % 2
    near = distance == distance.amin(-1, keepdim=True)
    return torch.where(near, odd, 2).argmin(-1)


class TestGoldenDecoding:
    def test_every_e4m3_code(self, vectors: dict[str, Tensor]) -> None:
        codes = torch.arange(256, dtype=torch.uint8)
        golden = vectors["fp8_e4m3.all_codes_fp32"]
        torch.testing.assert_close(q.decode_e4m3(codes), golden, rtol=0, atol=0, equal_nan=True)

    def test_every_ue8m0_byte(self, vectors: dict[str, Tensor]) -> None:
        codes = torch.arange(256, dtype=torch.uint8)
        golden = vectors["ue8m0.all_codes_fp32"]
        torch.testing.assert_close(q.decode_ue8m0(codes), golden, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("block", [128, 32])
    def test_fp8_blocks_with_partial_edges(self, vectors: dict[str, Tensor], block: int) -> None:
        name = f"fp8_block{block}"
        codes, scales = vectors[f"{name}.weight_u8"], vectors[f"{name}.scale_ue8m0_u8"]
        decoded = q.dequantize_fp8_block(codes, scales, block=block)
        assert torch.equal(decoded, vectors[f"{name}.dequant_fp32"])

    def test_fp8_rows(self, vectors: dict[str, Tensor]) -> None:
        decoded = q.dequantize_fp8_32(
            vectors["fp8_row32.weight_u8"], vectors["fp8_row32.scale_ue8m0_u8"]
        )
        assert torch.equal(decoded, vectors["fp8_row32.dequant_fp32"])

    def test_mxfp4_weights(self, vectors: dict[str, Tensor]) -> None:
        decoded = q.dequantize_fp4_32(vectors["mxfp4.packed_u8"], vectors["mxfp4.scale_ue8m0_u8"])
        assert torch.equal(decoded, vectors["mxfp4.dequant_fp32"])

    def test_index_rows_of_another_writer(self, vectors: dict[str, Tensor]) -> None:
        """Ties down and a floor on the scale: another rule for encoding, the same for decoding."""
        scales = vectors["indexk_fp4.scale_ue8m0_x4_i32"].view(torch.uint8).view(-1, 4)
        decoded = q.dequantize_fp4_32(vectors["indexk_fp4.packed_u8"], scales)
        assert torch.equal(decoded, vectors["indexk_fp4.dequant_fp32"])


class TestGoldenEncoding:
    def test_compressed_rows_byte_for_byte(self, vectors: dict[str, Tensor]) -> None:
        codes, scales = q.quantize_fp4_16(vectors["v41_ckv_fp4.input_bf16"])
        rows = torch.cat((codes, scales), -1)
        assert torch.equal(rows.flatten(1), vectors["v41_ckv_fp4.interleaved_rows_u8"])
        decoded = q.dequantize_fp4_16(codes, scales).bfloat16()
        assert torch.equal(decoded, vectors["v41_ckv_fp4.dequant_bf16"])
        assert torch.equal(decoded, vectors["v41_ckv_fp4.nemo_fake_quant_bf16"])

    def test_window_rows_by_value(self, vectors: dict[str, Tensor]) -> None:
        decoded = q.round_trip_fp8_32(vectors["v41_swa_fp8.input_bf16"])
        assert torch.equal(decoded, vectors["v41_swa_fp8.dequant_bf16"])
        assert torch.equal(decoded, vectors["v41_swa_fp8.nemo_fake_quant_bf16"])

    def test_window_bytes_but_for_the_floor(self, vectors: dict[str, Tensor]) -> None:
        """The file's writer floors amax / 448 at 1e-4, ours amax (v41-model 4.2).

        Groups up to 448 * 2^-14 therefore have another scale and other codes; no byte else.
        """
        x = vectors["v41_swa_fp8.input_bf16"].flatten(0, 1)
        golden = vectors["v41_swa_fp8.interleaved_rows_u8"].view(-1, 528)
        rows = torch.cat(q.quantize_fp8_32(x), -1)
        other_floor = x.float().unflatten(-1, (-1, 32)).abs().amax(-1) <= 448 * 2.0**-14
        explained = torch.cat((other_floor.repeat_interleave(32, 1), other_floor), 1)
        differs = rows != golden
        assert not (differs & ~explained).any()
        assert int(other_floor.sum()) == 2
        assert int(differs.sum()) == 34
        assert torch.equal(
            q.dequantize_fp8_32(golden[:, :512], golden[:, 512:]).bfloat16(),
            vectors["v41_swa_fp8.dequant_bf16"].flatten(0, 1),
        )

    def test_v4_rows_byte_for_byte_but_for_the_floor(self, vectors: dict[str, Tensor]) -> None:
        """The file's writer floors amax at 1e-8, ours at 1e-4 (v4-model 4.1)."""
        x = vectors["v4_kv_fp8.input_bf16"][:, :448]
        codes, scales = q.quantize_fp8_64(x)
        golden_codes, golden_scales = (vectors[f"v4_kv_fp8.row_{n}_u8"] for n in ("nope", "scale"))
        above = x.float().unflatten(-1, (-1, 64)).abs().amax(-1) >= 1e-4
        assert above.sum() > 150
        assert torch.equal(scales[above], golden_scales[above])
        above = above.repeat_interleave(64, 1)
        assert torch.equal(codes[above], golden_codes[above])
        decoded = q.dequantize_fp8_64(golden_codes, golden_scales)
        assert torch.equal(decoded.bfloat16(), vectors["v4_kv_fp8.dequant_bf16"][:, :448])
        assert (q.dequantize_fp8_64(codes, scales) - decoded).abs().max() < 2.0**-31

    def test_index_rows_by_value(self, vectors: dict[str, Tensor]) -> None:
        decoded = q.round_trip_fp4_32(vectors["indexk_fp4.input_bf16"])
        assert torch.equal(decoded, vectors["indexk_fp4.ties_even_fake_quant_bf16"])


class TestCodes:
    def test_e4m3_codes_survive(self) -> None:
        codes = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8)
        assert torch.equal(q.encode_e4m3(q.decode_e4m3(codes)), codes)

    def test_e2m1_pairs_survive(self) -> None:
        packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
        assert torch.equal(q.encode_e2m1(q.decode_e2m1(packed)), packed)

    def test_low_nibble_comes_first(self) -> None:
        assert q.decode_e2m1(torch.tensor([0xF1], dtype=torch.uint8)).tolist() == [0.5, -6.0]

    def test_ue8m0_bytes_survive(self) -> None:
        normal = torch.arange(1, 255, dtype=torch.uint8)
        assert torch.equal(q.encode_ue8m0(q.decode_ue8m0(normal)), normal)

    def test_ue8m0_ends_are_a_subnormal_and_nan(self) -> None:
        low, high = q.decode_ue8m0(torch.tensor([0, 255], dtype=torch.uint8)).tolist()
        assert low == 2.0**-127
        assert math.isnan(high)

    @pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
    @pytest.mark.parametrize(
        ("tie", "even"),
        [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4)],
    )
    def test_e2m1_tie_goes_to_the_even_code(self, tie: float, even: float, sign: int) -> None:
        below = np.nextafter(np.float32(tie), np.float32(0))
        above = np.nextafter(np.float32(tie), np.float32(9))
        x = sign * torch.tensor([below, tie, above, even], dtype=torch.float32)
        got = q.decode_e2m1(q.encode_e2m1(x)).abs()
        lower = max(v for v in q.E2M1_VALUES if v < tie)
        upper = min(v for v in q.E2M1_VALUES if v > tie)
        assert got.tolist() == [lower, even, upper, even]

    def test_e4m3_tie_goes_to_the_even_code(self) -> None:
        grid = q.decode_e4m3(torch.tensor(E4M3_GRID, dtype=torch.uint8))
        ties = (grid[1:] + grid[:-1]) / 2
        codes = q.encode_e4m3(torch.cat((ties, -ties)))
        even = torch.tensor([c + c % 2 for c in E4M3_GRID[:-1]], dtype=torch.uint8)
        assert torch.equal(codes, torch.cat((even, even | 128)))


class TestQuantizers:
    @every_format
    def test_value_is_the_nearest_on_the_scaled_grid(self, name: str) -> None:
        quantize, dequantize, block = FORMATS[name]
        x = rows_over_octaves(16, 256)
        codes, scales = quantize(x)
        decode_scale = q.decode_e4m3 if name == "fp4_16" else q.decode_ue8m0
        scale = decode_scale(scales).repeat_interleave(block, -1)
        grid = (
            q.decode_e4m3(torch.tensor(E4M3_GRID, dtype=torch.uint8))
            if name.startswith("fp8")
            else torch.tensor(q.E2M1_VALUES)
        )
        best = grid[nearest_even(x / scale, grid)] * scale
        assert torch.equal(dequantize(codes, scales), torch.copysign(best, x))

    @every_format
    def test_scale_is_the_smallest_that_fits(self, name: str) -> None:
        """At the largest value of the grid, and a few float32 steps around it, at every octave.

        The rule's own arithmetic is float32: amax times the constant 1/448 or 1/6 (the e4m3 scale
        divides), and the rounded product decides (v41-model 4.3).
        """
        quantize, _, block = FORMATS[name]
        largest = np.float32(448 if name.startswith("fp8") else 6)
        octaves = range(-5, 8) if name == "fp4_16" else range(-12, 100)
        for octave, steps in itertools.product(octaves, range(-3, 4)):
            amax = np.float32(largest * 2.0**octave)
            amax = (amax.view(np.int32) + np.int32(steps)).view(np.float32)
            scale = quantize(torch.full((1, block), float(amax)))[1].item()
            if name == "fp4_16":
                wanted = q.encode_e4m3(torch.tensor(float(amax / np.float32(6)))).item()
            else:
                fraction, exponent = math.frexp(amax * np.float32(1 / largest))
                wanted = exponent - (fraction == 0.5) + 127
            assert scale == wanted, (octave, steps)

    @pytest.mark.parametrize(
        ("name", "scale"),
        [("fp8_32", 105), ("fp8_64", 105), ("fp4_16", 1), ("fp4_32", 1)],
        ids=["2^-22", "2^-22 of 64", "2^-9", "2^-126"],
    )
    def test_zeros_take_the_floor_and_keep_their_signs(self, name: str, scale: int) -> None:
        quantize, dequantize, block = FORMATS[name]
        zeros = torch.zeros(1, block)
        zeros[0, 1::2] = -0.0
        codes, scales = quantize(zeros)
        assert scales.tolist() == [[scale]]
        decoded = dequantize(codes, scales)
        assert torch.equal(decoded, zeros)
        assert torch.equal(decoded.signbit(), zeros.signbit())

    def test_compressed_rows_saturate(self) -> None:
        x = torch.full((1, 16), 1.0)
        x[0, 0], x[0, 1] = 1e6, -2689.0
        codes, scales = q.quantize_fp4_16(x)
        assert scales.tolist() == [[126]]
        assert q.dequantize_fp4_16(codes, scales)[0, :2].tolist() == [2688.0, -2688.0]

    @every_format
    @pytest.mark.parametrize("sign", [1, -1], ids=["nan", "-nan"])
    def test_nan_marks_its_group_and_no_other(self, name: str, sign: int) -> None:
        quantize, dequantize, block = FORMATS[name]
        x = torch.randn(2, 2 * block)
        x[0, 3] = math.copysign(math.nan, sign)
        decoded = dequantize(*quantize(x))
        assert decoded[0, :block].isnan().all()
        assert decoded.isnan().sum() == block

    @pytest.mark.parametrize("name", ["fp8_32", "fp8_64", "fp4_32"])
    def test_infinity_marks_its_group(self, name: str) -> None:
        quantize, dequantize, block = FORMATS[name]
        x = torch.randn(1, 2 * block)
        x[0, 3] = -math.inf
        assert dequantize(*quantize(x)).isnan().tolist() == [[True] * block + [False] * block]

    def test_infinity_saturates_where_the_scale_does(self) -> None:
        """The rule of 4.1 clamps the scale at 448; the op that made the infinity is named."""
        x = torch.full((1, 16), math.inf)
        assert q.dequantize_fp4_16(*q.quantize_fp4_16(x)).unique().tolist() == [2688.0]

    @every_format
    def test_float64_is_rounded_to_float32_first(self, name: str) -> None:
        """Or a last bit of a float64, which depends on the chunking, could move a code."""
        quantize, _, _ = FORMATS[name]
        x = rows_over_octaves(8, 128).double() * (1 + 1e-12)
        for got, wanted in zip(quantize(x), quantize(x.float()), strict=True):
            assert torch.equal(got, wanted)

    @every_format
    def test_values_on_the_grid_survive(self, name: str) -> None:
        """Requantising stored rows changes nothing, so copies of copies stay equal.

        But for scales of twice the smallest E4M3: where 4 is the largest of a block, what is stored
        asks for the smallest, whose largest value is 6.
        """
        quantize, dequantize, block = FORMATS[name]
        codes, scales = quantize(rows_over_octaves(16, 256))
        once = dequantize(codes, scales)
        moved = (dequantize(*quantize(once)) != once).unflatten(-1, (-1, block)).any(-1)
        if name == "fp4_16":
            moved &= scales != 2
        assert not moved.any()

    @every_format
    def test_every_value_is_exact_in_bfloat16(self, name: str) -> None:
        quantize, dequantize, _ = FORMATS[name]
        values = dequantize(*quantize(rows_over_octaves(16, 256)))
        assert torch.equal(values.bfloat16().float(), values)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("round_trip", [q.round_trip_fp8_32, q.round_trip_fp4_32])
    def test_round_trip_keeps_the_dtype(
        self, round_trip: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> None:
        assert round_trip(torch.randn(2, 64).to(dtype)).dtype is dtype


@pytest.mark.parametrize("width", [128, 320, 48])
def test_each_block_of_an_input_has_a_scale_of_its_own(width: int) -> None:
    """The last one is what is left of a row."""
    x = rows_over_octaves(50, width)
    blocks = [q.round_trip_fp8_row(part) for part in x.split(128, dim=1)]
    assert torch.equal(q.round_trip_fp8(x, 128), torch.cat(blocks, dim=1))


class TestRowScales:
    def test_equal_blocks_of_32_but_for_what_is_small_in_its_row(self) -> None:
        x = rows_over_octaves(50, 256)
        got, wanted = q.round_trip_fp8_row(x), q.round_trip_fp8_32(x)
        power = torch.exp2((x.abs().amax(-1, keepdim=True) / 448).log2().ceil())
        small = x.abs() < power * 2.0**-6
        assert small.any()
        assert torch.equal(got[~small], wanted[~small])
        assert ((got - x).abs() <= power * 2.0**-10)[small].all()

    def test_move_no_row_by_more_than_a_third_of_a_thousandth(self) -> None:
        """The worst there is: a channel that just needs its power, all others between two codes."""
        x = torch.full((1, 5120), 1.5 * 2.0**-9)
        x[0, 77] = 225
        apart = q.round_trip_fp8_row(x) - q.round_trip_fp8_32(x)
        assert 2.8e-4 < apart.norm() / x.norm() < 3.1e-4

    def test_keep_a_broken_row_broken_and_alone(self) -> None:
        x = torch.randn(3, 64)
        x[1, 5] = torch.inf
        got = q.round_trip_fp8_row(x)
        assert got[1].isnan().all()
        assert got[[0, 2]].isfinite().all()
