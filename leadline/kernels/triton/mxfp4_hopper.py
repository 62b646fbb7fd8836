"""Products of sorted pairs with MXFP4 weights, on Hopper (kernels.md 10.3).

As in ``packed_matmul_hopper``, weights are the operand that comes from registers, and codes and
inputs are copied in bulk, some stages ahead; here by a warp that does nothing else. A warpgroup
expands codes while another one multiplies. A thread loads sixteen bytes of a row, which are one
block of 32 channels, hence one scale. Instructions of ``mxfp4`` make pairs of them that are four
channels apart; ``arrange`` puts inputs in the order that follows from both.
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
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from leadline.kernels.triton import rings
from leadline.kernels.triton.expert_tiles import Tiles, is_size
from leadline.kernels.triton.mxfp4 import EXPAND
from leadline.kernels.triton.quant import on_fp8_grid

CHANNELS = 128
"""Of a stage: what is summed over has a multiple of them."""

ROWS = gl.constexpr(128)
"""Of the weight, that a warpgroup multiplies."""

_BLOCK = 1024

# Weights are multiplied as 2^-32 times their value, so that scales up to 2^33 fit bf16; larger ones
# count as that.
_GROW = gl.constexpr(2.0**32)
_LARGEST = gl.constexpr(160)

_CODES = gl.constexpr(gl.NVMMASharedLayout(64, 16, rank=3))
# Rows as the operand has them; a thread has eight words in a row, and their scale.
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [1, 0, 0], [0, 32, 0]],
        lane_bases=[[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 8, 0], [0, 16, 0]],
        block_bases=[],
        shape=[2, 64, 32],
    )
)
_SCALES = gl.constexpr(
    gl.SliceLayout(
        3,
        gl.DistributedLinearLayout(
            reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [1, 0, 0, 0], [0, 32, 0, 0]],
            lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
            warp_bases=[[0, 8, 0, 0], [0, 16, 0, 0]],
            block_bases=[],
            shape=[2, 64, 4, 4],
        ),
    )
)
_INPUTS = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
_HALF_INPUTS = gl.constexpr(gl.NVMMASharedLayout(128, 16))


def arrange(x: Tensor, tiles: Tiles, ids: Tensor, input_block: int) -> Tensor:
    """Inputs of sorted pairs, in the order of channels of ``multiply``.

    Args:
        x: ``[m, K]`` bf16, K a multiple of 128.
        tiles: of ``ids``.
        ids: ``[m, k]``, contiguous.
        input_block: channels that share a scale where inputs are rounded to FP8; 0 leaves them.

    Returns:
        ``[K / 64, m k, 64]`` bf16: 64 channels of all pairs lie together. Where no pair
        is, values are any.
    """
    num_rows, width = x.shape
    values = empty_inputs(ids.numel(), width, x.device)
    _arrange[(num_rows, triton.cdiv(width, _BLOCK))](
        x,
        x.stride(0),
        ids,
        tiles.places,
        values,
        width,
        PER_ROW=ids.shape[1],
        INPUT_BLOCK=input_block,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return values


def empty_inputs(num_pairs: int, width: int, device: torch.device) -> Tensor:
    """What ``arrange`` returns, to be written at ``place_of``."""
    return torch.empty(width // 64, num_pairs, 64, dtype=torch.bfloat16, device=device)


@triton.jit
def _arrange(
    x,
    stride,
    ids,
    places,
    values,
    width,
    PER_ROW: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of one row, for all of its pairs."""
    row, part = tl.program_id(0), tl.program_id(1)
    channel = part * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    value = tl.load(x + row.to(tl.int64) * stride + channel, mask=inside, other=0.0)
    if INPUT_BLOCK:
        value = on_fp8_grid(value.to(tl.float32).reshape(1, BLOCK), INPUT_BLOCK)
    # [.., thread, word, neighbour, pair, 8 apart] -> the order of ``_expand``.
    value = value.reshape(BLOCK // 128, 4, 4, 2, 2, 2).permute(0, 2, 4, 5, 1, 3).reshape(BLOCK)
    at = (channel // 64).to(tl.int64) * (tl.num_programs(0) * PER_ROW * 64) + channel % 64
    for slot in tl.static_range(PER_ROW):
        pair = row * PER_ROW + slot
        if tl.load(ids + pair) >= 0:
            place = tl.load(places + pair).to(tl.int64)
            tl.store(values + at + place * 64, value, mask=inside)


@gluon.jit
def place_of(channel):
    """Which 64 channels hold this one, and where among them."""
    thread, word, pair = channel // 32 % 4, channel // 8 % 4, channel // 2 % 2
    place = word % 2 * 32 + pair * 16 + channel % 2 * 8 + thread * 2 + channel // 4 % 2
    return channel // 128 * 2 + word // 2, place


def describe_inputs(values: Tensor, pairs: int) -> TensorDescriptor:
    """What copies so many pairs' inputs of a stage, of those of ``arrange``."""
    return TensorDescriptor.from_tensor(values, [2, pairs, 64], _INPUTS.value)


def describe_codes(codes: Tensor, apart: int) -> TensorDescriptor:
    """What copies a stage of a warpgroup's codes: 64 rows, and as many ``apart`` from them.

    Args:
        codes: ``[E, out, K / 2]`` uint8.
        apart: rows from one half to the other, of which ``out`` is a multiple.
    """
    words = codes.view(torch.int16)
    halves = words.view(-1, apart, words.shape[2])
    box = [2, ROWS.value // 2, CHANNELS // 4]
    return TensorDescriptor.from_tensor(halves, box, _CODES.value)


class Ring(NamedTuple):
    """Stages in shared memory, handed from ``copy`` to ``multiply``.

    Words of four codes ``[stages, 2, 64, 32]`` of up to two warpgroups, and inputs ``[stages, 2, n,
    64]``, which they share.
    """

    codes: Any
    other_codes: Any
    inputs: Any
    full: Any
    empty: Any


@gluon.jit
def ring_of(STAGES: gl.constexpr, PAIRS: gl.constexpr, GROUPS: gl.constexpr):
    """Allocate it for up to so many pairs, and one or two warpgroups that multiply."""
    codes = gl.allocate_shared_memory(gl.int16, [STAGES, 2, ROWS // 2, 32], _CODES)
    other_codes = codes
    if GROUPS == 2:
        other_codes = gl.allocate_shared_memory(gl.int16, [STAGES, 2, ROWS // 2, 32], _CODES)
    return Ring(
        codes,
        other_codes,
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2, PAIRS, 64], _INPUTS),
        rings.barriers(STAGES, 1),
        rings.barriers(STAGES, GROUPS),
    )


class Source(NamedTuple):
    """What a program multiplies.

    Attributes:
        codes: descriptor of ``describe_codes``.
        rows: place of the rows' first half along its first dimension, and first row of both halves
            along the second; then both of the other warpgroup.
        inputs: descriptors of ``describe_inputs``, for whole tiles, halves and quarters.
        place: of the first pair.
        size: pairs of the tile.
        chunks: ``K / 128``.
    """

    codes: Any
    rows: Any
    inputs: Any
    place: Any
    size: Any
    chunks: Any


@gluon.jit
def copy(ring, source, HALVINGS: gl.constexpr, PAIRS: gl.constexpr, GROUPS: gl.constexpr):
    """Copy all stages of a tile; it may be halved so many times."""
    for halvings in gl.static_range(HALVINGS + 1):
        if is_size(source.size, PAIRS >> halvings, halvings == HALVINGS):
            _copy_tile(ring, source, source.inputs[halvings], PAIRS >> halvings, GROUPS)


@gluon.jit
def _copy_tile(ring, source, inputs, PAIRS: gl.constexpr, GROUPS: gl.constexpr):
    shape: gl.constexpr = [ring.full.shape[0], 2, PAIRS, 64]
    values = ring.inputs._reinterpret(gl.bfloat16, shape, _INPUTS)
    for turn in range(source.chunks):
        rings.wait_empty(ring.empty, turn)
        stage = turn % ring.full.shape[0]
        full = ring.full.index(stage)
        # What lies beyond the end is zeros, and counts.
        mbarrier.expect(full, 64 * ROWS * GROUPS + 256 * PAIRS)
        at = [source.rows[0], source.rows[1], 32 * turn]
        tma.async_copy_global_to_shared(source.codes, at, full, ring.codes.index(stage))
        if GROUPS == 2:
            at = [source.rows[2], source.rows[3], 32 * turn]
            tma.async_copy_global_to_shared(source.codes, at, full, ring.other_codes.index(stage))
        at = [2 * turn, source.place, 0]
        tma.async_copy_global_to_shared(inputs, at, full, values.index(stage))


@gluon.jit
def multiply(ring, codes, scales, apart, chunks, PAIRS: gl.constexpr):
    """``W x^T`` of a warpgroup's rows and a tile's pairs: ``[64, pairs, 2]`` float32, by halves.

    Args:
        ring: filled by ``copy``.
        codes: those of the ring that are this warpgroup's.
        scales: pointer to the scale bytes of the first half's rows, ``[.., K / 32]``.
        apart: rows from one half to the other.
        chunks: ``K / 128``.
        PAIRS: of the tile.
    """
    layout: gl.constexpr = _layout_of_sums(PAIRS)
    at_scale = scales + _offsets_of_scales(apart, chunks)
    # Two stages ahead: these are too few to be copied with the codes.
    following = gl.load(at_scale)
    second_following = gl.load(at_scale + 4 * gl.minimum(1, chunks - 1))
    sums = gl.zeros([ROWS, PAIRS], gl.float32, layout)
    for turn in range(chunks):
        factors = _factors(following)
        following = second_following
        second_following = gl.load(at_scale + 4 * gl.minimum(turn + 2, chunks - 1))
        rings.wait_full(ring.full, turn)
        low, high = _load(codes, turn)
        # What multiplies while this warpgroup expands is another one.
        operand = _expand(low, factors, layout)
        sums = warpgroup_mma(operand, _inputs(ring, turn, 0, PAIRS), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        operand = _expand(high, factors, layout)
        sums = warpgroup_mma(operand, _inputs(ring, turn, 1, PAIRS), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        rings.arrive(ring.empty, turn)
    # Both halves of a row's neighbours are in one thread (``_expand``).
    halves = gl.permute(gl.reshape(sums * _GROW, [ROWS // 16, 2, 8, PAIRS]), (0, 2, 3, 1))
    return gl.reshape(halves, [ROWS // 2, PAIRS, 2])


@gluon.jit
def _inputs(ring, turn, HALF: gl.constexpr, PAIRS: gl.constexpr):
    """The right operand: half a stage's channels."""
    stages: gl.constexpr = ring.full.shape[0]
    halves = ring.inputs._reinterpret(gl.bfloat16, [2 * stages, PAIRS, 64], _HALF_INPUTS)
    return halves.index(2 * (turn % stages) + HALF).permute((1, 0))


@gluon.jit
def _load(codes, turn):
    """A stage's codes, those of a half of each thread's words: ``[2, 64, 4, 4]`` twice."""
    words = codes.index(turn % codes.shape[0]).load(_WORDS)
    return gl.split(gl.permute(gl.reshape(words, [2, ROWS // 2, 4, 2, 4]), (0, 1, 2, 4, 3)))


@gluon.jit
def _offsets_of_scales(apart, chunks):
    """Of a stage's scale bytes, ``[2, 64, 4]``, from the first."""
    of_rows: gl.constexpr = gl.SliceLayout(2, _SCALES)
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, of_rows))
    row = gl.arange(0, ROWS // 2, layout=gl.SliceLayout(0, of_rows))
    row = row[None, :] + half[:, None] * apart
    block = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, _SCALES)))
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
    factors = gl.expand_dims(factors, 3).broadcast_to(words.shape)
    factors = gl.convert_layout(factors, words.type.layout, assert_trivial=True)
    a, b, c, d = gl.inline_asm_elementwise(
        EXPAND, "=&r,=&r,=&r,=&r,r,r", [words, factors], (gl.bfloat16,) * 4, True, 2
    )
    # [half, rows, thread, word, neighbour, 8 apart, pair]
    values = gl.join(gl.join(a, b), gl.join(c, d))
    values = gl.reshape(values, [2, ROWS // 16, 8, 4, 2, 2, 2, 2])
    values = gl.reshape(gl.permute(values, (1, 0, 2, 4, 7, 6, 3, 5)), [ROWS, 64])
    return gl.convert_layout(values, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.constexpr_function
def _layout_of_sums(pairs):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pairs, 16])
