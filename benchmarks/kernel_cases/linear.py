"""Products with FP8 weights as stored (kernels.md 9 and 11)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.kernel_cases.case import Case, within
from leadline.kernels.packed import PackedWeight, WeightFormat
from leadline.kernels.reference import experts as reference_experts
from leadline.kernels.reference import linear as reference
from leadline.kernels.triton import grouped_linear, linear, shared_expert

HIDDEN, EXPERT, LIMIT = 5120, 2304, 10.0
GROUPS, RANK, GROUP_WIDTH = 8, 1024, 4096

# (rows, width) -> tokens -> microseconds of kernels.md 18.4.
PEERS: dict[tuple[int, int], dict[int, dict[str, float]]] = {
    (1792, 5120): {
        1: {"cuBLAS bf16": 8.76, "DeepGEMM": 8.71, "CUTLASS rowwise": 6.52},
        8: {"cuBLAS bf16": 9.63, "DeepGEMM": 8.03},
        32: {"cuBLAS bf16": 9.97, "DeepGEMM": 8.09, "CUTLASS rowwise": 8.38},
        128: {"cuBLAS bf16": 11.1, "DeepGEMM": 8.05, "CUTLASS rowwise": 10.5},
        8192: {"cuBLAS bf16": 226, "DeepGEMM": 144},
    },
    (32768, 1280): {
        1: {"cuBLAS bf16": 22.6, "DeepGEMM": 14.8, "CUTLASS": 13.4},
        8: {"cuBLAS bf16": 23.0, "DeepGEMM": 14.7, "CUTLASS": 17.4},
        32: {"cuBLAS bf16": 23.7, "DeepGEMM": 15.2, "CUTLASS": 17.1},
        128: {"cuBLAS bf16": 27.3, "DeepGEMM": 16.3, "CUTLASS": 16.7},
        1024: {"cuBLAS bf16": 135, "DeepGEMM": 78.7, "CUTLASS rowwise": 75.4},
        8192: {"cuBLAS bf16": 1049, "DeepGEMM": 640, "CUTLASS rowwise": 585},
    },
    (5120, 8192): {
        1: {"cuBLAS bf16": 26.6, "DeepGEMM": 18.0, "CUTLASS rowwise": 13.6},
        8: {"cuBLAS bf16": 27.0, "DeepGEMM": 16.6, "CUTLASS rowwise": 13.8},
        32: {"cuBLAS bf16": 26.9, "DeepGEMM": 16.6, "CUTLASS rowwise": 18.8},
        64: {},  # a tile that no other case has
        128: {"cuBLAS bf16": 25.7, "DeepGEMM": 19.5, "CUTLASS rowwise": 17.8},
        1024: {"cuBLAS bf16": 110, "DeepGEMM": 72.1, "CUTLASS rowwise": 76.0},
        8192: {"cuBLAS bf16": 1015, "DeepGEMM": 550, "CUTLASS rowwise": 575},
    },
    (25600, 6144): {1: {}, 32: {}},  # of Engram, which no peer has
    (8192, 1280): {
        1: {"cuBLAS bf16": 8.38, "DeepGEMM": 6.86, "CUTLASS rowwise": 5.47},
        32: {"cuBLAS bf16": 7.80, "DeepGEMM": 5.47, "CUTLASS rowwise": 6.10},
    },
}
# tokens -> microseconds of kernels.md 18.2.
WO_A_PEERS: dict[int, dict[str, float]] = {
    1: {"DeepGEMM FP8": 13.6, "bmm bf16": 18.1},
    8: {"DeepGEMM FP8": 14.2, "bmm bf16": 18.1},
    32: {"DeepGEMM FP8": 14.5, "bmm bf16": 18.9},
    128: {"DeepGEMM FP8": 14.8, "bmm bf16": 21.7},
    1024: {"DeepGEMM FP8": 64.4, "bmm bf16": 103},
    8192: {"DeepGEMM FP8": 509, "bmm bf16": 829},
}


def random_weight(
    device: torch.device, *shape: int, quantizes_input: bool = True, aligned: bool = False
) -> PackedWeight:
    """Random bytes: codes without NaN, the scales of trained weights."""
    codes = torch.randint(256, shape, device=device, dtype=torch.uint8)
    codes.masked_fill_(codes & 0x7F == 0x7F, 0)
    *groups, rows, width = shape
    tiles = (*groups, rows // 32, width // 32)
    scales = torch.randint(113, 121, tiles, device=device, dtype=torch.uint8)
    if aligned:
        scales = scales[..., ::4].repeat_interleave(4, dim=-1)
    return PackedWeight(codes, scales, WeightFormat.FP8_BLOCK32, quantizes_input, aligned=aligned)


def random_tokens(device: torch.device, *shape: int) -> Tensor:
    """bf16 normal values."""
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def weight_bytes(*sizes: int) -> float:
    """Of weights with this many values (kernels.md 0.2)."""
    return sum(sizes) * (1 + 1 / 1024)


def _linear(tokens: int, rows: int, width: int, *, aligned: bool = False) -> Case:
    def make(device: torch.device) -> tuple[Tensor, PackedWeight]:
        weight = random_weight(device, rows, width, aligned=aligned)
        return random_tokens(device, tokens, width), weight

    share = None
    if tokens <= 32:
        share = 0.8 if rows * width > 4e7 else 0.6
    elif tokens >= 4096:
        share = 0.85
    return Case(
        kernel="11",
        op="linear",
        shape=f"{rows}x{width}, {'aligned, ' * aligned}T={tokens}",
        make=make,
        fused=linear.linear,
        twin=reference.linear,
        check=within(2.5e-3),
        bytes=weight_bytes(rows * width) + 2 * tokens * (rows + width),
        flops=2 * tokens * rows * width,
        target_share=share,
        peers=PEERS[rows, width][tokens],
    )


def _grouped_linear(tokens: int, *, aligned: bool = False) -> Case:
    def make(device: torch.device) -> tuple[Tensor, PackedWeight]:
        x = random_tokens(device, tokens, GROUPS, GROUP_WIDTH)
        shape = GROUPS, RANK, GROUP_WIDTH
        return x, random_weight(device, *shape, quantizes_input=False, aligned=aligned)

    return Case(
        kernel="9",
        op="grouped_linear",
        shape=f"{'aligned, ' * aligned}T={tokens}",
        make=make,
        fused=grouped_linear.grouped_linear,
        twin=reference.grouped_linear,
        check=within(3e-3),
        bytes=weight_bytes(GROUPS * RANK * GROUP_WIDTH)
        + 2 * tokens * GROUPS * (RANK + GROUP_WIDTH),
        flops=2 * tokens * GROUPS * RANK * GROUP_WIDTH,
        target_us=10.5 if tokens <= 32 else None,
        target_share=0.7 if tokens >= 2048 else None,
        peers=WO_A_PEERS[tokens],
    )


def _output_projection(tokens: int, *, aligned: bool = False) -> Case:
    def make(device: torch.device) -> tuple[Tensor, PackedWeight, PackedWeight]:
        heads = random_tokens(device, tokens, 64, GROUPS * GROUP_WIDTH // 64)
        shape = GROUPS, RANK, GROUP_WIDTH
        wo_a = random_weight(device, *shape, quantizes_input=False, aligned=aligned)
        return heads, wo_a, random_weight(device, HIDDEN, GROUPS * RANK, aligned=aligned)

    def twin(x: Tensor, wo_a: PackedWeight, wo_b: PackedWeight) -> Tensor:
        z = reference.grouped_linear(x.reshape(len(x), GROUPS, GROUP_WIDTH), wo_a)
        return reference.linear(z.flatten(1), wo_b)

    def unfused(x: Tensor, wo_a: PackedWeight, wo_b: PackedWeight) -> Tensor:
        z = grouped_linear.grouped_linear(x.reshape(len(x), GROUPS, GROUP_WIDTH), wo_a)
        return linear.linear(z.flatten(1), wo_b)

    values = GROUPS * RANK * (GROUP_WIDTH + HIDDEN)
    return Case(
        kernel="9",
        op="output_projection",
        shape=f"{'aligned, ' * aligned}T={tokens}",
        make=make,
        fused=grouped_linear.output_projection,
        twin=twin,
        # Sums in another order move some values to the next step of the MXFP8 grid.
        check=within(1e-2),
        bytes=weight_bytes(values) + 2 * tokens * (GROUPS * GROUP_WIDTH + HIDDEN),
        flops=2 * tokens * values,
        unfused=unfused,
    )


def _shared_expert(tokens: int, *, aligned: bool = False) -> Case:
    def make(device: torch.device) -> tuple[Tensor, PackedWeight, PackedWeight]:
        w13 = random_weight(device, 2 * EXPERT, HIDDEN, aligned=aligned)
        # A smaller step for the gate: SwiGLU would clamp nearly every product otherwise.
        w13.scales.sub_(4)
        w2 = random_weight(device, HIDDEN, EXPERT, aligned=aligned)
        return random_tokens(device, tokens, HIDDEN), w13, w2

    values = 3 * EXPERT * HIDDEN
    return Case(
        kernel="11",
        op="shared_expert",
        shape=f"{'aligned, ' * aligned}T={tokens}",
        make=make,
        fused=functools.partial(shared_expert.shared_expert, limit=LIMIT),
        twin=functools.partial(reference_experts.shared_expert, limit=LIMIT),
        check=within(1e-2),
        bytes=weight_bytes(values) + 4 * tokens * HIDDEN,
        flops=2 * tokens * values,
        target_share=0.85 if tokens >= 4096 else None,
    )


def _cases() -> Iterator[Case]:
    yield from (_grouped_linear(tokens) for tokens in WO_A_PEERS)
    # With 8 tokens, and aligned with 128, only the second product streams its weight.
    yield from (_output_projection(tokens) for tokens in (1, 8, 32, 8192))
    for (rows, width), by_tokens in PEERS.items():
        yield from (_linear(tokens, rows, width) for tokens in by_tokens)
    yield from (_shared_expert(tokens) for tokens in (1, 32, 8192))
    # Steps of decoding over weights whose scales were aligned when they were loaded.
    for (rows, width), by_tokens in PEERS.items():
        few = [tokens for tokens in by_tokens if tokens <= 128]
        yield from (_linear(tokens, rows, width, aligned=True) for tokens in few)
    yield from (_grouped_linear(tokens, aligned=True) for tokens in (1, 8, 32))
    yield from (_output_projection(tokens, aligned=True) for tokens in (1, 32, 128))
    yield from (_shared_expert(tokens, aligned=True) for tokens in (1, 32))


CASES = list(_cases())
