"""Products with packed weights against their definitions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.kernels.packed import LinearWeight, PackedWeight, WeightFormat, align_scales
from leadline.kernels.reference import linear as reference
from leadline.kernels.reference import quant as reference_quant
from leadline.kernels.triton import grouped_linear, linear, packed_matmul, quant, shared_expert
from tests.kernels.bounds import FP8_SUM, Bounded, bf16

LIMIT = 10.0
ONE = 0x38  # as an E4M3 code


def packed(*shape: int, device: torch.device, quantizes_input: bool = True) -> PackedWeight:
    """Random codes without NaN, scales as trained weights have them."""
    codes = torch.randint(256, shape, device=device, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    *groups, rows, width = shape
    tiles = (*groups, -(-rows // 32), -(-width // 32))
    scales = torch.randint(113, 121, tiles, device=device, dtype=torch.uint8)
    return PackedWeight(codes, scales, WeightFormat.FP8_BLOCK32, quantizes_input)


def tokens(*shape: int, device: torch.device) -> Tensor:
    """A hundredth of the channels thirty times as large (kernels.md 0.4)."""
    large = 1 + 29.0 * (torch.rand(shape[-1], device=device) < 0.01)
    return (torch.randn(shape, device=device) * large).bfloat16()


def product(x: Bounded, weight: PackedWeight) -> Bounded:
    """In bf16, of ``[m, in]`` or ``[m, G, in]``."""
    if weight.quantizes_input:
        x = x.rounded(lambda x: reference_quant.round_trip_fp8(x, weight.input_block))
    dense = dataclasses.replace(weight, dtype=torch.float64).dense
    # Where 128 channels have codes of one scale, the smallest are subnormal ones.
    return x.blurred(2.0**-17).product(dense, FP8_SUM).rounded(bf16)


def assert_in(actual: Tensor, wanted: Bounded) -> None:
    assert actual.dtype is torch.bfloat16
    assert actual.shape == wanted.value.shape
    assert wanted.contains(actual)


def assert_product(actual: Tensor, x: Tensor, weight: PackedWeight) -> None:
    assert_in(actual, product(Bounded.exactly(x), weight))


def assert_projection(actual: Tensor, x: Tensor, wo_a: PackedWeight, wo_b: PackedWeight) -> None:
    """Of heads ``[m, H, d]``."""
    grouped = Bounded.exactly(x.reshape(len(x), *wo_a.shape[::2]))
    assert_in(actual, product(product(grouped, wo_a).flatten(1), wo_b))


def assert_shared_expert(actual: Tensor, x: Tensor, w13: PackedWeight, w2: PackedWeight) -> None:
    hidden = product(Bounded.exactly(x), w13).swiglu(LIMIT).rounded(bf16)
    assert_in(actual, product(hidden, w2))


@pytest.fixture(params=["streamed", "expanded"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways for few tokens: with FP8 tensor cores and without; Hopper's own is elsewhere."""
    monkeypatch.setattr(packed_matmul, "is_hopper", lambda: False)
    if request.param == "expanded":
        monkeypatch.setattr(packed_matmul, "_has_fp8_tensor_cores", lambda: False)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 63, 64, 65, 129])
def test_any_number_of_tokens(device: torch.device, count: int) -> None:
    x, weight = tokens(count, 64, device=device), packed(64, 64, device=device)
    assert_product(linear.linear(x, weight), x, weight)


@pytest.mark.parametrize("count", [1, 8, 17, 33, 70])
@pytest.mark.parametrize("quantizes_input", [True, False], ids=["rounded", "as it is"])
def test_aligned_weights(device: torch.device, count: int, quantizes_input: bool) -> None:
    """Two groups, a block and a half wide."""
    weight = align_scales(packed(2, 64, 416, device=device, quantizes_input=quantizes_input))
    assert weight.aligned
    x = tokens(count, 2, 416, device=device)
    actual = packed_matmul.packed_matmul(x, weight).unflatten(1, (2, -1))
    assert_product(actual, x, weight)


def packed_128(*shape: int, device: torch.device, quantizes_input: bool = True) -> PackedWeight:
    """Tiles of 128 x 128, told as ``weights.load`` does; the last ones may be partial."""
    weight = packed(*shape, device=device, quantizes_input=quantizes_input)
    tiles = weight.scales[..., ::4, ::4].repeat_interleave(4, -2).repeat_interleave(4, -1)
    rows, columns = weight.scales.shape[-2:]
    scales = tiles[..., :rows, :columns].contiguous()
    return dataclasses.replace(weight, scales=scales, aligned=True, input_block=128)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("count", [1, 9, 70])
@pytest.mark.parametrize(("rows", "width"), [(320, 128), (80, 416), (33, 32)], ids=str)
def test_tiles_and_input_blocks_of_128(
    device: torch.device, count: int, rows: int, width: int
) -> None:
    x, weight = tokens(count, width, device=device), packed_128(rows, width, device=device)
    assert_product(linear.linear(x, weight), x, weight)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("count", [1, 8, 9, 70])
def test_input_is_rounded_in_blocks_of_128(device: torch.device, count: int) -> None:
    """Shown by the identity; values lie octaves apart, and the last block is partial."""
    x = tokens(count, 160, device=device)
    x *= 2.0 ** torch.randint(-12, 12, (160,), device=device)
    codes = (ONE * torch.eye(160, device=device)).to(torch.uint8)
    scales = torch.full((5, 5), 127, dtype=torch.uint8, device=device)
    weight = PackedWeight(codes, scales, WeightFormat.FP8_BLOCK32, aligned=True, input_block=128)
    wanted = reference_quant.round_trip_fp8(x, 128)
    assert not torch.equal(wanted, reference_quant.round_trip_fp8_32(x))
    assert torch.equal(linear.linear(x, weight), wanted)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("count", [1, 12])
def test_chains_round_in_blocks_of_128(device: torch.device, count: int) -> None:
    wo_a = packed_128(2, 160, 64, device=device, quantizes_input=False)
    wo_b = packed_128(96, 320, device=device)
    x = tokens(count, 4, 32, device=device)
    actual = grouped_linear.output_projection(x, wo_a, wo_b)
    assert_projection(actual, x, wo_a, wo_b)
    w13, w2 = packed_128(2 * 160, 128, device=device), packed_128(128, 160, device=device)
    w13.scales.sub_(4)  # or SwiGLU would clamp nearly every product
    x = tokens(count, 128, device=device)
    actual = shared_expert.shared_expert(x, w13, w2, limit=LIMIT)
    assert_shared_expert(actual, x, w13, w2)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("count", [1, 70])
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 32), (100, 96), (33, 160)], ids=lambda size: f"{size}"
)
def test_any_shape(device: torch.device, count: int, rows: int, width: int) -> None:
    x, weight = tokens(count, width, device=device), packed(rows, width, device=device)
    assert_product(linear.linear(x, weight), x, weight)


@pytest.mark.usefixtures("route")
def test_a_narrow_matrix_is_cut_along_its_input(device: torch.device) -> None:
    x, weight = tokens(2, 1280, device=device), packed(64, 1280, device=device)
    assert_product(linear.linear(x, weight), x, weight)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("count", [1, 8, 9, 70])
def test_input_is_rounded_as_by_the_reference(device: torch.device, count: int) -> None:
    """The identity gives the input as the product saw it."""
    x = tokens(count, 64, device=device)
    codes = (ONE * torch.eye(64, device=device)).to(torch.uint8)
    scales = torch.full((2, 2), 127, dtype=torch.uint8, device=device)
    weight = PackedWeight(codes, scales, WeightFormat.FP8_BLOCK32)
    assert torch.equal(linear.linear(x, weight), reference_quant.round_trip_fp8_32(x))


@pytest.mark.parametrize("count", [4, 32, 64, 96], ids=lambda n: f"{n} tokens")
def test_weights_are_exact(device: torch.device, count: int) -> None:
    """The identity as input gives the weights: all codes, at scales from tiny to absurd."""
    row = torch.arange(256, device=device, dtype=torch.uint8)
    codes = row.unsqueeze(1).expand(-1, 96).clone()
    codes[codes & 0x7F == 0x7F] = 0
    scales = torch.tensor([30, 60, 105, 113, 127, 140, 150, 154], dtype=torch.uint8, device=device)
    scales = scales[torch.randint(8, (8, 3))]
    weight = PackedWeight(codes, scales, WeightFormat.FP8_BLOCK32, quantizes_input=False)
    x = torch.eye(96, device=device, dtype=torch.bfloat16)[:count]
    assert torch.equal(linear.linear(x, weight), weight.dense.T[:count])


@pytest.mark.usefixtures("route")
def test_zero_tiles_may_have_any_scale(device: torch.device) -> None:
    x, weight = tokens(3, 96, device=device), packed(64, 96, device=device)
    weight.scales[0] = torch.tensor([0, 254, 120])
    weight.codes[:32, 32:64] = 0
    weight.codes[40:] = 0
    actual = linear.linear(x, weight)
    assert_product(actual, x, weight)
    assert not actual[:, 40:].any()


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("count", [5, 70])
def test_broken_rows_stay_alone(device: torch.device, count: int) -> None:
    x, weight = tokens(count, 64, device=device), packed(64, 64, device=device)
    wanted = linear.linear(x, weight)
    x[0], x[2, 3] = torch.nan, torch.inf
    actual = linear.linear(x, weight)
    assert torch.equal(actual[[1, 3, 4]], wanted[[1, 3, 4]])
    assert not actual[[0, 2]].isfinite().any()


def test_long_prompts_are_multiplied_by_torch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_matmul, "_EXPANDED_FROM", 10)
    x, weight = tokens(12, 160, device=device), packed(72, 160, device=device)
    assert_product(linear.linear(x, weight), x, weight)
    groups = packed(2, 64, 96, device=device, quantizes_input=False)
    x = tokens(12, 2, 96, device=device)
    assert_product(grouped_linear.grouped_linear(x, groups), x, groups)
    dense = packed_matmul._expand(groups)
    assert torch.equal(dense, groups.dense)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("count", [0, 1, 9, 70])
def test_grouped_linear(device: torch.device, count: int) -> None:
    """Two of four groups, as a rank of two holds them; rows with padding between them."""
    weight = packed(4, 32, 96, device=device, quantizes_input=False)
    part = dataclasses.replace(weight, codes=weight.codes[2:], scales=weight.scales[2:])
    x = tokens(count, 4, 112, device=device)[:, :2, :96]
    assert_product(grouped_linear.grouped_linear(x, part), x, part)


@pytest.mark.parametrize("aligned", [False, True], ids=["plain", "aligned"])
@pytest.mark.parametrize("count", [0, 1, 6, 12])
def test_output_projection(device: torch.device, count: int, aligned: bool) -> None:
    wo_a = packed(2, 96, 64, device=device, quantizes_input=False)
    wo_b = packed(96, 192, device=device)
    if aligned:
        wo_a, wo_b = align_scales(wo_a), align_scales(wo_b)
    x = tokens(count, 4, 32, device=device)
    actual = grouped_linear.output_projection(x, wo_a, wo_b)
    assert_projection(actual, x, wo_a, wo_b)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("aligned", [False, True], ids=["plain", "aligned"])
@pytest.mark.parametrize("count", [1, 6])
def test_a_product_hands_over_what_the_next_one_would_have_made(
    device: torch.device, count: int, aligned: bool
) -> None:
    """A chain of two products gives the same bits as one product after the other."""
    wo_a = packed(2, 96, 320, device=device, quantizes_input=False)
    wo_b = packed(96, 192, device=device)
    if aligned:
        wo_a, wo_b = align_scales(wo_a), align_scales(wo_b)
    x = tokens(count, 4, 160, device=device)
    z = grouped_linear.grouped_linear(x.reshape(count, 2, 320), wo_a).flatten(1)
    actual = grouped_linear.output_projection(x, wo_a, wo_b)
    assert torch.equal(actual, linear.linear(z, wo_b))


def test_output_projection_rounds_between_its_products(device: torch.device) -> None:
    """The identity behind the groups shows what the second product is given."""
    wo_a = packed(2, 32, 64, device=device, quantizes_input=False)
    codes = (ONE * torch.eye(64, device=device)).to(torch.uint8)
    scales = torch.full((2, 2), 127, dtype=torch.uint8, device=device)
    wo_b = PackedWeight(codes, scales, WeightFormat.FP8_BLOCK32)
    x = tokens(3, 4, 32, device=device)
    z = grouped_linear.grouped_linear(x.reshape(3, 2, 64), wo_a).flatten(1)
    actual = grouped_linear.output_projection(x, wo_a, wo_b)
    assert torch.equal(actual, reference_quant.round_trip_fp8_32(z))


@pytest.mark.parametrize("aligned", [False, True], ids=["plain", "aligned"])
@pytest.mark.parametrize("count", [0, 1, 12])
def test_shared_expert(device: torch.device, count: int, aligned: bool) -> None:
    w13, w2 = packed(2 * 96, 64, device=device), packed(64, 96, device=device)
    w13.scales.sub_(4)  # or SwiGLU would clamp nearly every product
    if aligned:
        w13, w2 = align_scales(w13), align_scales(w2)
    x = tokens(count, 64, device=device)
    actual = shared_expert.shared_expert(x, w13, w2, limit=LIMIT)
    assert_shared_expert(actual, x, w13, w2)


def test_shared_expert_keeps_broken_rows_broken(device: torch.device) -> None:
    w13, w2 = packed(64, 64, device=device), packed(64, 32, device=device)
    x = tokens(2, 64, device=device)
    wanted = shared_expert.shared_expert(x, w13, w2, limit=1.0)
    x[0] = torch.nan
    actual = shared_expert.shared_expert(x, w13, w2, limit=1.0)
    assert actual[0].isnan().all()
    assert torch.equal(actual[1], wanted[1])


def test_plain_weights_are_torch_s(device: torch.device) -> None:
    x = tokens(3, 64, device=device)
    dense = torch.randn(2, 48, 64, device=device, dtype=torch.bfloat16)
    plain, groups = (LinearWeight(w, WeightFormat.PLAIN) for w in (dense[0], dense))
    assert torch.equal(linear.linear(x, plain), reference.linear(x, plain))
    pairs = torch.stack((x, x), dim=1)
    actual = grouped_linear.grouped_linear(pairs, groups)
    assert torch.equal(actual, reference.grouped_linear(pairs, groups))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_wide_linear_takes_weights_in_bf16(device: torch.device, count: int) -> None:
    x, weight = tokens(count, 64, device=device), torch.randn(100, 64, device=device).bfloat16()
    actual = linear.wide_linear(x, weight)
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual, (x.double() @ weight.double().T).float())


@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (7, 96), (2, 3, 1280)], ids=str)
@pytest.mark.parametrize("block", [32, 128])
def test_rounding_to_fp8(device: torch.device, shape: tuple[int, ...], block: int) -> None:
    x = tokens(*shape, device=device) * 2.0 ** torch.randint(-40, 30, shape, device=device)
    assert torch.equal(quant.round_trip_fp8(x, block), reference_quant.round_trip_fp8(x, block))
