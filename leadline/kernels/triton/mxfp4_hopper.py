"""Products of sorted pairs with MXFP4 weights, on Hopper (kernels.md 10.3).

As in ``packed_matmul_hopper``: weights are the operand that comes from registers, codes and inputs
are copied in bulk, some stages ahead, and codes expand while the last products are under way. A
thread loads sixteen bytes of a row, which is one block of 32 channels, hence one scale. What
``mxfp4`` makes of them are pairs of channels that are four apart, so channels are dealt out in
another order here than there: ``arrange`` puts inputs in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from leadline.kernels.triton import rings
from leadline.kernels.triton.mxfp4 import EXPAND
from leadline.kernels.triton.quant import on_fp8_grid

CHANNELS = 128
"""Of a stage: what is summed over has a multiple of them."""

_BLOCK = 1024

# Weights are multiplied as 2^-32 times their value, so that scales up to 2^33 fit bf16; larger ones
# count as that.
_GROW = gl.constexpr(2.0**32)
_LARGEST = gl.constexpr(160)

_CODES = gl.constexpr(gl.NVMMASharedLayout(64, 16, rank=3))
_INPUTS = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
_HALF_INPUTS = gl.constexpr(gl.NVMMASharedLayout(128, 16))


def arrange(x: Tensor, pairs: Tensor | None, per_row: int, input_block: int) -> Tensor:
    """Inputs of sorted pairs, in the order of channels of ``multiply``.

    Args:
        x: ``[m, K]`` bf16, K a multiple of 128.
        pairs: ``[P]`` int32 of ``Tiles``: row ``pair // per_row`` is the input of a pair; None
            where rows are those of pairs already.
        per_row: pairs of a row.
        input_block: channels that share a scale where inputs are rounded to FP8; 0 leaves them.

    Returns:
        ``[K / 64, P, 64]`` bf16: 64 channels of all pairs lie together. Unused places have any
        value.
    """
    num_pairs, width = len(x) if pairs is None else len(pairs), x.shape[1]
    values = x.new_empty(width // 64, num_pairs, 64)
    _arrange[(num_pairs, triton.cdiv(width, _BLOCK))](
        x,
        x.stride(0),
        pairs,
        values,
        width,
        PER_ROW=per_row,
        INPUT_BLOCK=input_block,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return values


@triton.jit
def _arrange(
    x,
    stride,
    pairs,
    values,
    width,
    PER_ROW: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of one pair's input."""
    place, part = tl.program_id(0), tl.program_id(1)
    row = place if pairs is None else tl.load(pairs + place) // PER_ROW
    if row >= 0:
        channel = part * BLOCK + tl.arange(0, BLOCK)
        inside = channel < width
        value = tl.load(x + row.to(tl.int64) * stride + channel, mask=inside, other=0.0)
        if INPUT_BLOCK:
            value = on_fp8_grid(value.to(tl.float32).reshape(1, BLOCK), INPUT_BLOCK)
        # [.., thread, word, neighbour, pair, 8 apart] -> the order of ``_expand``.
        value = value.reshape(BLOCK // 128, 4, 4, 2, 2, 2).permute(0, 2, 4, 5, 1, 3).reshape(BLOCK)
        at = (channel // 64).to(tl.int64) * tl.num_programs(0) + place
        tl.store(values + at * 64 + channel % 64, value, mask=inside)


def describe_inputs(values: Tensor, tokens: int) -> TensorDescriptor:
    """What copies so many pairs' inputs of a stage, of those of ``arrange``."""
    box = [2, tokens, 64]
    return TensorDescriptor(values, list(values.shape), list(values.stride()), box, _INPUTS.value)


def describe_codes(codes: Tensor, rows: int, apart: int) -> TensorDescriptor:
    """What copies a stage of a tile's codes: half of its rows, and as many ``apart`` from them.

    Args:
        codes: ``[E, out, K / 2]`` uint8.
        rows: of a tile.
        apart: rows from one half to the other, of which ``out`` is a multiple.
    """
    width = codes.shape[2] // 2
    return TensorDescriptor(
        codes.view(torch.int16),
        [codes.shape[0] * codes.shape[1] // apart, apart, width],
        [apart * width, width, 1],
        [2, rows // 2, CHANNELS // 4],
        _CODES.value,
    )


class _Ring(NamedTuple):
    """Stages in shared memory: words of four codes ``[2, rows / 2, 32]``, inputs ``[2, n, 64]``."""

    codes: Any
    inputs: Any
    full: Any


class _Source(NamedTuple):
    """What a program copies: descriptors of codes and inputs, and where its part of each begins."""

    codes: Any
    half: Any
    row: Any
    inputs: Any
    place: Any
    chunks: Any


@gluon.jit
def multiply(
    codes,
    half,
    row,
    scales,
    inputs,
    place,
    chunks,
    apart,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """``W x^T`` of a tile of rows and one of pairs: ``[rows / 2, pairs, 2]`` float32, by halves.

    Args:
        codes: descriptor of ``describe_codes``.
        half: place of the first half's rows along its first dimension.
        row: the first row of both halves along the second.
        scales: pointer to the scale bytes of the first half's rows, ``[.., K / 32]``.
        inputs: descriptor of ``describe_inputs``.
        place: of the first pair.
        chunks: ``K / 128``.
        apart: rows from one half to the other.
        ROWS: of both halves.
        TOKENS: pairs.
        STAGES: in shared memory.
    """
    warps: gl.constexpr = gl.num_warps()
    sums_layout: gl.constexpr = _layout_of_sums(TOKENS, warps)
    gl.assume(chunks > 0)  # or sums might be finished without a product, which costs their overlap
    ring = _Ring(
        gl.allocate_shared_memory(gl.int16, [STAGES, 2, ROWS // 2, 32], _CODES),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2, TOKENS, 64], _INPUTS),
        rings.barriers(STAGES, 1),
    )
    source = _Source(codes, half, row, inputs, place, chunks)
    for turn in gl.static_range(STAGES - 1):
        _copy(source, ring, turn)
    at_scale = scales + _offsets_of_scales(apart, chunks, ROWS, warps)
    # Two stages ahead: these are too few to be copied with the codes.
    following = gl.load(at_scale)
    second_following = gl.load(at_scale + 4 * gl.minimum(1, chunks - 1))
    sums = warpgroup_mma_init(gl.zeros([ROWS, TOKENS], gl.float32, sums_layout))
    second = gl.zeros([ROWS, 64], gl.bfloat16, gl.DotOperandLayout(0, sums_layout, 2))
    for turn in range(chunks):
        factors = _factors(following)
        following = second_following
        rings.wait_full(ring.full, turn)
        low, high = _load(ring, turn, warps)
        first = _expand(low, factors, sums_layout)
        sums = warpgroup_mma(first, _inputs(ring, turn, 0), sums, is_async=True)
        # Operands in registers may not change before the product has read them.
        sums, second = warpgroup_mma_wait(1, deps=(sums, second))
        gl.thread_barrier()  # all are through with the stage before
        _copy(source, ring, turn + STAGES - 1)
        second_following = gl.load(at_scale + 4 * gl.minimum(turn + 2, chunks - 1))
        second = _expand(high, factors, sums_layout)
        sums = warpgroup_mma_init(sums)
        sums = warpgroup_mma(second, _inputs(ring, turn, 1), sums, is_async=True)
        sums, first = warpgroup_mma_wait(1, deps=(sums, first))
        sums = warpgroup_mma_init(sums)
    sums, second = warpgroup_mma_wait(0, deps=(sums, second))
    # Both halves of a row's neighbours are in one thread (``_expand``).
    halves = gl.permute(gl.reshape(sums * _GROW, [ROWS // 16, 2, 8, TOKENS]), (0, 2, 3, 1))
    return gl.reshape(halves, [ROWS // 2, TOKENS, 2])


@gluon.jit
def _copy(source, ring, turn):
    """Start to copy a stage, if there is one."""
    stage = turn % ring.full.shape[0]
    is_there = turn < source.chunks
    full = ring.full.index(stage)
    # What lies beyond the end is zeros, and counts.
    size: gl.constexpr = 128 * ring.codes.shape[2] + 256 * ring.inputs.shape[2]
    mbarrier.expect(full, size, is_there)
    at = [source.half, source.row, 32 * turn]
    tma.async_copy_global_to_shared(source.codes, at, full, ring.codes.index(stage), is_there)
    at = [2 * turn, source.place, 0]
    tma.async_copy_global_to_shared(source.inputs, at, full, ring.inputs.index(stage), is_there)


@gluon.jit
def _inputs(ring, turn, HALF: gl.constexpr):
    """The right operand: half a stage's channels."""
    stages: gl.constexpr = ring.full.shape[0]
    shape: gl.constexpr = [2 * stages, ring.inputs.shape[2], 64]
    halves = ring.inputs._reinterpret(gl.bfloat16, shape, _HALF_INPUTS)
    return halves.index(2 * (turn % stages) + HALF).permute((1, 0))


@gluon.jit
def _load(ring, turn, WARPS: gl.constexpr):
    """A stage's codes, those of a half of each thread's words: ``[2, rows / 2, 4, 4]`` twice."""
    rows: gl.constexpr = ring.codes.shape[2]
    words = ring.codes.index(turn % ring.full.shape[0]).load(_layout_of_words(rows, WARPS))
    words = gl.permute(gl.reshape(words, [2, rows, 4, 2, 4]), (0, 1, 2, 4, 3))
    return gl.split(words)


@gluon.jit
def _offsets_of_scales(apart, chunks, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Of a stage's scale bytes, ``[2, rows / 2, 4]``, from the first."""
    layout: gl.constexpr = _layout_of_scales(ROWS // 2, WARPS)
    of_rows: gl.constexpr = gl.SliceLayout(2, layout)
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, of_rows))
    row = gl.arange(0, ROWS // 2, layout=gl.SliceLayout(0, of_rows))
    row = row[None, :] + half[:, None] * apart
    block = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    block = gl.expand_dims(gl.expand_dims(block, 0), 0)
    return gl.expand_dims(row, 2) * (4 * chunks) + block


@gluon.jit
def _factors(exponents):
    """bf16 by which ``EXPAND`` multiplies; byte 255 is NaN."""
    e = exponents.to(gl.int16)
    bits = gl.where(e == 255, 0x7FC0, (gl.minimum(e, _LARGEST) + 94) << 7)
    return bits.to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _expand(words, factors, SUMS: gl.constexpr):
    """Half a stage's codes as the left operand, 2^-32 times their values.

    Of sixteen rows of it the first eight are of the first half, and eight of the second follow.
    """
    rows: gl.constexpr = words.shape[1]
    factors = gl.convert_layout(
        gl.expand_dims(factors, 3).broadcast_to([2, rows, 4, 4]), words.type.layout, True
    )
    a, b, c, d = gl.inline_asm_elementwise(
        EXPAND, "=&r,=&r,=&r,=&r,r,r", [words, factors], (gl.bfloat16,) * 4, True, 2
    )
    # [half, rows, thread, word, neighbour, 8 apart, pair]
    values = gl.join(gl.join(a, b), gl.join(c, d))
    values = gl.reshape(values, [2, rows // 8, 8, 4, 2, 2, 2, 2])
    values = gl.reshape(gl.permute(values, (1, 0, 2, 4, 7, 6, 3, 5)), [2 * rows, 64])
    return gl.convert_layout(values, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.constexpr_function
def _layout_of_sums(tokens, warps):
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, tokens, 16])


@gluon.constexpr_function
def _layout_of_words(rows, warps):
    """Of ``[2, rows, 32]``: rows as the operand has them, eight words in a row a thread."""
    of_warps = [[0, 1 << bit, 0] for bit in range(3, rows.bit_length() - 1)]
    held = warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [1, 0, 0], *of_warps[held:]],
        lane_bases=[[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=of_warps[:held],
        block_bases=[],
        shape=[2, rows, 32],
    )


@gluon.constexpr_function
def _layout_of_scales(rows, warps):
    """Of ``[2, rows, 4]``, a byte for each thread's words of a row."""
    of_warps = [[0, 1 << bit, 0, 0] for bit in range(3, rows.bit_length() - 1)]
    held = warps.bit_length() - 1
    words = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [1, 0, 0, 0], *of_warps[held:]],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        warp_bases=of_warps[:held],
        block_bases=[],
        shape=[2, rows, 4, 4],
    )
    return gl.SliceLayout(3, words)
