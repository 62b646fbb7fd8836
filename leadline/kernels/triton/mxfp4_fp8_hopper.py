"""Products of sorted pairs with MXFP4 weights by FP8 tensor cores, on Hopper (kernels.md 10.3).

E2M1 is E4M3 with other bits between sign and magnitude, and 2^-6 times its value: six integer
instructions expand eight weights, where bf16 takes 17. A product of 32 channels is one instruction
of the tensor cores, whose sum no other is added to: what adds them, in float32, applies the scale
of a row's block. The next products are under way meanwhile.

Activations are those of ``fp8_inputs``; their powers count once, at the end.

A warp copies codes and activations in bulk, some stages ahead. Scales are too few for that: each
thread of the warpgroup loads a word of four, and lays them into shared memory as float32 for all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from leadline.kernels.triton import rings
from leadline.kernels.triton.fp8_inputs import GROUP, Inputs

CHANNELS = 256
"""Of a stage: what is summed over has a multiple of them."""

ROWS = gl.constexpr(64)
"""Of the weight, that a program multiplies: half of them, and as many that lie apart from them."""

# Scales of weights are 2^-32 of what they are, so that none overflows before the sum does.
_LIFT = gl.constexpr(2.0**-32)
_GROW = gl.constexpr(2.0**32)

_CODES = gl.constexpr(gl.NVMMASharedLayout(128, 8, rank=3))
_INPUTS = gl.constexpr(gl.NVMMASharedLayout(128, 8, rank=3))
_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

# Of ``[2, 32, 64]``: 64 rows and their bytes as the left operand has them.
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [1, 0, 0], [0, 0, 16], [0, 0, 32]],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 8, 0], [0, 16, 0]],
        block_bases=[],
        shape=[2, 32, 64],
    )
)
# Of ``[64, 4]``, rows as sums have them.
_FACTORS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)

# The sign is the top bit of both; below lie the three bits of the magnitude, here at 4..2. Adding
# 0x60 carries a lower code's sign, which lies at 5, to the top.
_EXPAND = gl.constexpr("""
{
    .reg .b32 t;
    and.b32 t, $2, 0x0F0F0F0F;
    mad.lo.u32 t, t, 4, 0x60606060;
    and.b32 $0, t, 0x9C9C9C9C;
    shr.u32 t, $2, 2;
    lop3.b32 t, $2, t, 0x80808080, 0xE4;
    and.b32 $1, t, 0x9C9C9C9C;
}
""")


def describe_inputs(inputs: Inputs, pairs: int) -> TensorDescriptor:
    """What copies so many rows' codes of a stage."""
    codes = inputs.codes.view(torch.float8_e4m3fn)
    return TensorDescriptor.from_tensor(codes, [2, pairs, GROUP], _INPUTS.value)


def describe_codes(codes: Tensor, apart: int) -> TensorDescriptor:
    """What copies a stage of codes: half of the rows, and as many ``apart`` from them.

    Args:
        codes: ``[E, out, K / 2]`` uint8.
        apart: rows from one half to the other, of which ``out`` is a multiple.
    """
    halves = codes.view(-1, apart, codes.shape[2])
    return TensorDescriptor.from_tensor(halves, [2, ROWS.value // 2, CHANNELS // 2], _CODES.value)


class Source(NamedTuple):
    """What a program multiplies.

    Attributes:
        codes: descriptor of ``describe_codes``.
        matrix: place of the rows' first half along its first dimension,
        row: and first row of both halves along its second.
        scales: pointer to words of four scales of the first half's rows, ``[.., K / 128]`` int32.
        apart: rows from one half to the other.
        inputs: descriptors of ``describe_inputs``, for whole tiles, halves and quarters.
        place: of the first pair.
        size: pairs of the tile.
        chunks: ``K / 256``.
    """

    codes: Any
    matrix: Any
    row: Any
    scales: Any
    apart: Any
    inputs: Any
    place: Any
    size: Any
    chunks: Any


class Ring(NamedTuple):
    """Stages in shared memory, handed from ``copy`` to ``multiply``, and scales of two.

    Bytes of two codes ``[stages, 2, 32, 128]``; codes of activations ``[stages, 2, n, 128]``;
    scales ``[2, 64, 8]`` float32.
    """

    codes: Any
    inputs: Any
    scales: Any
    full: Any
    empty: Any


@gluon.jit
def ring_of(STAGES: gl.constexpr, N: gl.constexpr):
    """Allocate it for up to so many pairs."""
    return Ring(
        gl.allocate_shared_memory(gl.uint8, [STAGES, 2, ROWS // 2, 128], _CODES),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 2, N, 128], _INPUTS),
        gl.allocate_shared_memory(gl.float32, [2, ROWS, 8], _SCALES),
        rings.barriers(STAGES, 1),
        rings.barriers(STAGES, 1),
    )


@gluon.jit
def copy(ring, source, HALVINGS: gl.constexpr, N: gl.constexpr):
    """Copy all stages of a tile of so many pairs: what a warp of its own does."""
    stages: gl.constexpr = ring.full.shape[0]
    inputs = ring.inputs._reinterpret(gl.float8e4nv, [stages, 2, N, 128], _INPUTS)
    for turn in range(source.chunks):
        rings.wait_empty(ring.empty, turn)
        stage = turn % stages
        full = ring.full.index(stage)
        # What lies beyond the end is zeros, and counts.
        mbarrier.expect(full, 128 * ROWS + 256 * N)
        at = [source.matrix, source.row, 128 * turn]
        tma.async_copy_global_to_shared(source.codes, at, full, ring.codes.index(stage))
        at = [2 * turn, source.place, 0]
        tma.async_copy_global_to_shared(source.inputs[HALVINGS], at, full, inputs.index(stage))


@gluon.jit
def multiply(ring, source, powers, N: gl.constexpr):
    """``W x^T`` of a program's rows and a tile's pairs: ``[32, n, 2]`` bf16, by halves of the rows.

    Args:
        ring: filled by ``copy``.
        source: what is multiplied.
        powers: pointer to those of the tile's pairs.
        N: pairs of the tile.
    """
    at_scale = source.scales + _offsets_of_scales(source.apart, source.chunks)
    last = source.chunks - 1
    ring.scales.index(0).store(_decode(gl.load(at_scale)))
    # Two turns ahead.
    following = gl.load(at_scale + 2 * gl.minimum(1, last))
    second_following = gl.load(at_scale + 2 * gl.minimum(2, last))
    sums = gl.zeros([ROWS, N], gl.float32, _layout_of_sums(N))
    for turn in range(source.chunks):
        rings.wait_full(ring.full, turn)
        sums = _add_by_twos(ring, turn, sums) if N <= 16 else _add_one_by_one(ring, turn, sums)
        rings.arrive(ring.empty, turn)
        # Behind the arrival, which waits for all warps, as does whoever loads these: twice a turn.
        ring.scales.index((turn + 1) % 2).store(_decode(following))
        following = second_following
        second_following = gl.load(at_scale + 2 * gl.minimum(turn + 3, last))
    return _by_halves(sums, powers, source.size)


@gluon.jit
def _by_halves(sums, powers, size):
    """Sums ``[64, n]`` times the powers of so many pairs, ``[32, n, 2]`` by halves of the rows.

    Both halves of neighbours are in one thread (``_WORDS``).
    """
    n: gl.constexpr = sums.shape[1]
    pair = gl.arange(0, n, layout=gl.SliceLayout(0, sums.type.layout))
    sums *= gl.load(powers + pair, mask=pair < size, other=0.0)[None, :]
    halves = gl.permute(gl.reshape(sums * _GROW, [4, 2, 8, n]), (0, 2, 3, 1))
    return gl.reshape(halves, [32, n, 2]).to(gl.bfloat16)


@gluon.jit
def _add_by_twos(ring, turn, sums):
    """A stage's products: two blocks' are under way while two others' are scaled."""
    words = _words(ring, turn, 0)
    first = _multiply_two(ring, words, turn, 0, sums)
    second = _multiply_two(ring, words, turn, 2, sums)
    factors = _factors(ring, turn, 0)
    words = _words(ring, turn, 1)
    sums = _scale_two(first, factors, 0, 2, sums)
    first = _multiply_two(ring, words, turn, 4, sums)
    sums = _scale_two(second, factors, 2, 2, sums)
    second = _multiply_two(ring, words, turn, 6, sums)
    factors = _factors(ring, turn, 1)
    sums = _scale_two(first, factors, 4, 2, sums)
    return _scale_two(second, factors, 6, 0, sums)


@gluon.jit
def _add_one_by_one(ring, turn, sums):
    """One block's product is under way while another's is scaled: many pairs need registers."""
    words = _words(ring, turn, 0)
    factors = _factors(ring, turn, 0)
    first = _multiply(ring, words, turn, 0, sums)
    for block in gl.static_range(1, 8):
        if block == 4:
            words = _words(ring, turn, 1)
        second = _multiply(ring, words, turn, block, sums)
        sums = _scale(first, factors, block - 1, 1, sums)
        if block == 4:
            factors = _factors(ring, turn, 1)
        first = second
    return _scale(first, factors, 7, 0, sums)


@gluon.jit
def _multiply_two(ring, words, turn, BLOCK: gl.constexpr, sums):
    """Start the products of two blocks."""
    first = _multiply(ring, words, turn, BLOCK, sums)
    return first, _multiply(ring, words, turn, BLOCK + 1, sums)


@gluon.jit
def _multiply(ring, words, turn, BLOCK: gl.constexpr, sums):
    """Start the product of a block, which is like the sums but begins from nothing."""
    layout: gl.constexpr = sums.type.layout
    stages: gl.constexpr = ring.full.shape[0]
    half: gl.constexpr = [2 * stages, sums.shape[1], 128]
    inputs = ring.inputs._reinterpret(gl.float8e4nv, half, gl.NVMMASharedLayout(128, 8))
    inputs = inputs.index(2 * (turn % stages) + BLOCK // 4).permute((1, 0))
    weights = _expand(words[BLOCK % 4], layout)
    nothing = gl.zeros(sums.shape, gl.float32, layout)
    block = inputs.slice(32 * (BLOCK % 4), 32, 0)
    return warpgroup_mma(weights, block, nothing, use_acc=False, is_async=True)


@gluon.jit
def _scale_two(products, factors, BLOCK: gl.constexpr, UNDER_WAY: gl.constexpr, sums):
    """Add two blocks' products times their scales."""
    first, second = warpgroup_mma_wait(UNDER_WAY, deps=products)
    sums = first * _factor(factors, BLOCK, sums) + sums
    return second * _factor(factors, BLOCK + 1, sums) + sums


@gluon.jit
def _scale(product, factors, BLOCK: gl.constexpr, UNDER_WAY: gl.constexpr, sums):
    """Add a block's product times its scales."""
    # Sums wait as well, so that the assembler does not put off what adds to them.
    product, sums = warpgroup_mma_wait(UNDER_WAY, deps=(product, sums))
    return product * _factor(factors, BLOCK, sums) + sums


@gluon.jit
def _factor(factors, BLOCK: gl.constexpr, sums):
    """A block's scale of each row, as sums have them."""
    layout: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    return gl.convert_layout(factors[BLOCK % 4], layout, assert_trivial=True)[:, None]


@gluon.jit
def _factors(ring, turn, HALF: gl.constexpr):
    """Of each row in each block of half a stage."""
    return _split_blocks(ring.scales.index(turn % 2).slice(4 * HALF, 4, 1).load(_FACTORS))


@gluon.jit
def _words(ring, turn, HALF: gl.constexpr):
    """Codes of half a stage, ``[2, 32, 16]`` uint8 of each block of 32 channels."""
    words = ring.codes.index(turn % ring.full.shape[0]).slice(64 * HALF, 64, 2).load(_WORDS)
    return _split_blocks(gl.permute(gl.reshape(words, [2, ROWS // 2, 4, 16]), (0, 1, 3, 2)))


@gluon.jit
def _split_blocks(x):
    """``[.., 4]`` -> the four."""
    even, odd = gl.split(gl.reshape(x, _bits_of_last(x.shape)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def _expand(words, SUMS: gl.constexpr):
    """Codes of a block as the left operand, 2^-6 times their values.

    Of sixteen rows of it the first eight are of the first half, and eight of the second follow.
    """
    low, high = gl.inline_asm_elementwise(
        _EXPAND, "=&r,=&r,r", [words], (gl.uint8, gl.uint8), True, 4
    )
    # [half, eight rows, row, thread, byte, nibble]
    values = gl.reshape(gl.join(low, high), [2, 4, 8, 4, 4, 2])
    values = gl.reshape(gl.permute(values, (1, 0, 2, 5, 3, 4)), [64, 32])
    values = values.to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(values, gl.DotOperandLayout(0, SUMS, 4), assert_trivial=True)


@gluon.jit
def _offsets_of_scales(apart, chunks):
    """Of a stage's words of four scales, ``[rows, 2]``, rows in the order of the left operands."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    row = row // 16 * 8 + row % 8 + row // 8 % 2 * apart
    word = gl.arange(0, 2, layout=gl.SliceLayout(0, layout))
    return row[:, None] * (2 * chunks) + word[None, :]


@gluon.jit
def _decode(words):
    """Words of four scales ``[rows, 2]`` -> 2^-32 times those, ``[rows, 8]`` float32.

    Byte 0 is 0, and 255 is NaN.
    """
    low = gl.join((words & 0xFF) << 23, (words & 0xFF0000) << 7)
    high = gl.join((words & 0xFF00) << 15, (words >> 24 & 0xFF) << 23)
    power = gl.reshape(gl.join(low, high), [words.shape[0], 8]).to(gl.float32, bitcast=True)
    return power * _LIFT + power * 0.0  # of infinity, which 255 is here, the second is NaN


@gluon.constexpr_function
def _bits_of_last(shape):
    return [*shape[:-1], 2, 2]


@gluon.constexpr_function
def _layout_of_sums(n):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 32])
