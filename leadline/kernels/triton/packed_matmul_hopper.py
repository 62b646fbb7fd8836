"""Products of some tokens with FP8 weights as stored, on Hopper (kernels.md 9 and 11).

Weights stand on the side of the matrix instructions that may come from registers, tokens on the
narrow side, in shared memory. Both are copied there in bulk, some stages ahead; codes become bf16
in registers, two instructions a code, while the last products are under way. ``arrangement`` says
in which order of channels.

This needs wgmma, bulk copies and mbarriers, thus Gluon and compute capability 9.0;
``packed_matmul`` says what runs elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
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
from triton.language.extra.cuda import gdc_wait

from leadline.kernels.batch_invariance import planned_rows
from leadline.kernels.packed import PackedWeight
from leadline.kernels.triton import rings
from leadline.kernels.triton.arrangement import Arranged
from leadline.kernels.triton.launch import overlapped, processors

CHANNELS = 128
"""Of a stage: widths are multiples of it. Its halves lie one behind the other."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """What one program multiplies at a time.

    Attributes:
        tokens: at most.
        rows: of the weight.
        stages: of 128 channels, in shared memory.
        num_warps: that multiply.
        resident: programs of a multiprocessor.
    """

    tokens: int
    rows: int
    stages: int
    num_warps: int
    resident: int


# Few tokens wait for memory: small tiles, several on a multiprocessor. Many wait for the matrix
# instructions and for tokens, which large tiles read less often.
_TILES = (
    _Tile(16, 64, stages=4, num_warps=4, resident=4),
    _Tile(32, 64, stages=3, num_warps=4, resident=4),
    _Tile(64, 128, stages=3, num_warps=8, resident=2),
    _Tile(128, 128, stages=4, num_warps=8, resident=1),
)
_MANY_TOKENS = _Tile(128, 256, stages=3, num_warps=8, resident=1)
_MOST_SPLITS = 16

# A code and its sign eight times over become sign, exponent and mantissa of a bf16 by one shift and
# one mask, 2^120 too small; the product takes 2^20 less back than it should (``packed_matmul``).
_EXPAND = gl.constexpr("""
{
    .reg .b32 t;
    prmt.b32 t, $4, 0, 0x9180;
    shl.b32 t, t, 4;
    and.b32 t, t, 0x87F087F0;
    mul.rn.bf16x2 $0, t, $6;
    prmt.b32 t, $4, 0, 0xB3A2;
    shl.b32 t, t, 4;
    and.b32 t, t, 0x87F087F0;
    mul.rn.bf16x2 $1, t, $6;
    prmt.b32 t, $5, 0, 0x9180;
    shl.b32 t, t, 4;
    and.b32 t, t, 0x87F087F0;
    mul.rn.bf16x2 $2, t, $6;
    prmt.b32 t, $5, 0, 0xB3A2;
    shl.b32 t, t, 4;
    and.b32 t, t, 0x87F087F0;
    mul.rn.bf16x2 $3, t, $6;
}
""")
_GROW = gl.constexpr(2.0**20)

_CODES = gl.constexpr(gl.NVMMASharedLayout(64, 32, rank=3))
_HALF_CODES = gl.constexpr(gl.NVMMASharedLayout(64, 32))
_TOKENS = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
_HALF_TOKENS = gl.constexpr(gl.NVMMASharedLayout(128, 16))


def multiply(x: Arranged, weight: PackedWeight) -> Tensor:
    """``x W^T`` for each group, in parts yet to be added.

    Args:
        x: at least one token, as ``arrange`` makes it for this weight.
        weight: as ``packed_matmul`` takes it, ``in`` a multiple of 128.

    Returns:
        ``[parts, m, G, out]`` float32, or bf16 where there is one part.
    """
    groups, rows, width = weight.codes.shape
    tokens = x.values.shape[1]
    planned = planned_rows(tokens)
    tile = next((tile for tile in _TILES if tile.tokens >= planned), _MANY_TOKENS)
    row_blocks = groups * triton.cdiv(rows, tile.rows)
    chunks = width // CHANNELS
    splits = _splits(
        row_blocks * triton.cdiv(planned, tile.tokens),
        chunks,
        tile.resident * processors(weight.codes.device),
    )
    dtype = torch.float32 if splits > 1 else torch.bfloat16
    codes = weight.codes.view(torch.int32).view(groups * rows, width // 64, 16).transpose(0, 1)
    parts = x.values.new_empty(splits, tokens, groups, rows, dtype=dtype)
    _multiply_arranged[(triton.cdiv(tokens, tile.tokens), row_blocks, splits)](
        TensorDescriptor.from_tensor(x.values, [2, tile.tokens, 64], _TOKENS.value),
        TensorDescriptor.from_tensor(codes, [2, tile.rows, 16], _CODES.value),
        weight.scales.view(torch.int32),
        parts,
        tokens,
        rows,
        groups,
        chunks,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        STAGES=tile.stages,
        num_warps=tile.num_warps,
        **overlapped(),
    )
    return parts


def _splits(blocks: int, chunks: int, room: int) -> int:
    """Into how many parts to cut the input, so that all multiprocessors have as much to do.

    To begin and to end costs a program some four stages.

    Args:
        blocks: programs of one split.
        chunks: stages of all splits together.
        room: programs that the GPU holds at a time.
    """

    def cost(splits: int) -> int:
        return triton.cdiv(blocks * splits, room) * (triton.cdiv(chunks, splits) + 4)

    return min(range(1, min(_MOST_SPLITS, chunks) + 1), key=cost)


class _Ring(NamedTuple):
    """Stages in shared memory: codes by four ``[2, rows, 16]``, and tokens ``[2, tokens, 64]``."""

    codes: Any
    tokens: Any
    full: Any


class _Source(NamedTuple):
    """What a program copies: descriptors of codes and tokens, and where its part of each begins."""

    codes: Any
    row: Any
    code_chunk: Any
    tokens: Any
    token: Any
    token_chunk: Any
    chunks: Any


@gluon.jit(do_not_specialize=["num_tokens", "num_groups", "all_chunks"])
def _multiply_arranged(
    x,
    codes,
    scales,
    parts,
    num_tokens,
    num_rows,
    num_groups,
    all_chunks,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A block of tokens by a block of a group's rows, over one part of the input.

    Args:
        x: descriptor of the tokens.
        codes: descriptor of the weight's codes, four in a word.
        scales: words of four, those of a stage.
        parts: of the result.
        num_tokens: of all.
        num_rows: of a group.
        num_groups: of the weight.
        all_chunks: stages of all parts together.
        ROWS: of a block.
        TOKENS: of a block.
        STAGES: in shared memory.
    """
    warps: gl.constexpr = gl.num_warps()
    sums_layout: gl.constexpr = _layout_of_sums(TOKENS, warps)
    blocks = gl.cdiv(num_rows, ROWS)
    group, block = gl.program_id(1) // blocks, gl.program_id(1) % blocks
    splits = gl.num_programs(2)
    begin = gl.program_id(2) * all_chunks // splits
    chunks = (gl.program_id(2) + 1) * all_chunks // splits - begin
    gl.assume(chunks > 0)  # or sums might be finished without a product, which costs their overlap
    ring = _Ring(
        gl.allocate_shared_memory(gl.int32, [STAGES, 2, ROWS, 16], _CODES),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2, TOKENS, 64], _TOKENS),
        rings.barriers(STAGES, 1),
    )
    row, token = group * num_rows + block * ROWS, gl.program_id(0) * TOKENS
    source = _Source(codes, row, begin, x, token, group * all_chunks + begin, chunks)
    # Weights do not wait for the launch that arranges tokens.
    for turn in gl.static_range(STAGES - 1):
        _copy_codes(source, ring, turn)
    gdc_wait()
    for turn in gl.static_range(STAGES - 1):
        _copy_tokens(source, ring, turn)

    # Words of four scales, one stage ahead: these are too few to be copied with the codes.
    tile = gl.arange(0, ROWS // 32, layout=gl.SliceLayout(1, _layout_of_scales(ROWS, warps)))
    tile_rows = gl.cdiv(num_rows, 32)
    tile = group * tile_rows + gl.minimum(block * (ROWS // 32) + tile, tile_rows - 1)
    at_scale = scales + tile * all_chunks + begin
    following = gl.load(at_scale)
    sums = warpgroup_mma_init(gl.zeros([ROWS, TOKENS], gl.float32, sums_layout))
    second = gl.zeros([ROWS, 64], gl.bfloat16, gl.DotOperandLayout(0, sums_layout, 2))
    for turn in range(chunks):
        exponents = following
        rings.wait_full(ring.full, turn)
        first = _expand(ring, turn, 0, exponents, sums_layout)
        sums = warpgroup_mma(first, _tokens(ring, turn, 0), sums, is_async=True)
        # Operands in registers may not change before the product has read them.
        sums, second = warpgroup_mma_wait(1, deps=(sums, second))
        gl.thread_barrier()  # all are through with the stage before
        _copy_codes(source, ring, turn + STAGES - 1)
        _copy_tokens(source, ring, turn + STAGES - 1)
        following = gl.load(at_scale + gl.minimum(turn + 1, chunks - 1))
        second = _expand(ring, turn, 1, exponents, sums_layout)
        sums = warpgroup_mma_init(sums)
        sums = warpgroup_mma(second, _tokens(ring, turn, 1), sums, is_async=True)
        sums, first = warpgroup_mma_wait(1, deps=(sums, first))
        sums = warpgroup_mma_init(sums)
    sums, second = warpgroup_mma_wait(0, deps=(sums, second))

    token += gl.arange(0, TOKENS, layout=gl.SliceLayout(0, sums_layout))
    row = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums_layout))
    parts += gl.program_id(2).to(gl.int64) * (num_tokens * num_groups * num_rows)
    at = parts + group * num_rows + token[None, :] * (num_groups * num_rows) + row[:, None]
    inside = (token < num_tokens)[None, :] & (row < num_rows)[:, None]
    gl.store(at, (sums * _GROW).to(parts.dtype.element_ty), mask=inside)


@gluon.jit
def _copy_codes(source, ring, turn):
    """Start to copy those of a stage, if there is one, and expect its tokens too."""
    stage = turn % ring.full.shape[0]
    is_there = turn < source.chunks
    # What lies beyond the end is zeros, and counts.
    size: gl.constexpr = 128 * ring.codes.shape[2] + 256 * ring.tokens.shape[2]
    mbarrier.expect(ring.full.index(stage), size, is_there)
    at = [2 * (source.code_chunk + turn), source.row, 0]
    tma.async_copy_global_to_shared(
        source.codes, at, ring.full.index(stage), ring.codes.index(stage), is_there
    )


@gluon.jit
def _copy_tokens(source, ring, turn):
    """Likewise the tokens of a stage."""
    stage = turn % ring.full.shape[0]
    at = [2 * (source.token_chunk + turn), source.token, 0]
    tma.async_copy_global_to_shared(
        source.tokens,
        at,
        ring.full.index(stage),
        ring.tokens.index(stage),
        turn < source.chunks,
    )


@gluon.jit
def _tokens(ring, turn, HALF: gl.constexpr):
    """The right operand: half a stage's channels."""
    stages: gl.constexpr = ring.full.shape[0]
    shape: gl.constexpr = [2 * stages, ring.tokens.shape[2], 64]
    halves = ring.tokens._reinterpret(gl.bfloat16, shape, _HALF_TOKENS)
    return halves.index(2 * (turn % stages) + HALF).permute((1, 0))


@gluon.jit
def _expand(ring, turn, HALF: gl.constexpr, exponents, SUMS: gl.constexpr):
    """Half a stage's codes as the left operand, 2^-20 times their values."""
    stages: gl.constexpr = ring.full.shape[0]
    rows: gl.constexpr = ring.codes.shape[2]
    warps: gl.constexpr = SUMS.warps_per_cta[0]
    halves = ring.codes._reinterpret(gl.int32, [2 * stages, rows, 16], _HALF_CODES)
    words = halves.index(2 * (turn % stages) + HALF).load(_layout_of_words(rows, warps))
    of_blocks: gl.constexpr = gl.SliceLayout(0, _layout_of_scales(rows, warps))
    shift = 16 * HALF + 8 * gl.arange(0, 2, layout=of_blocks)
    # No more than bf16 can hold: beyond, weights are 0, or loading refuses them.
    exponents = gl.minimum((exponents[:, None] >> shift[None, :]) & 0xFF, 154)
    factors = (exponents + 100) * 0x800080  # in both halves of a word
    factors = gl.expand_dims(gl.expand_dims(factors, 1), 3)
    factors = gl.reshape(factors.broadcast_to([rows // 32, 32, 2, 8]), [rows, 16])
    factors = gl.convert_layout(factors, _layout_of_words(rows, warps), assert_trivial=True)
    a, b, c, d = gl.inline_asm_elementwise(
        _EXPAND, "=&r,=&r,=&r,=&r,r,r,r,r", [words, factors], (gl.bfloat16,) * 4, True, 2
    )
    # [rows, thread, 8 apart, neighbour, pair, pair] -> the order of ``arrangement``.
    values = gl.reshape(gl.join(gl.join(a, b), gl.join(c, d)), [rows, 4, 2, 2, 2, 2])
    values = gl.reshape(gl.permute(values, (0, 5, 4, 2, 1, 3)), [rows, 64])
    return gl.convert_layout(values, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.constexpr_function
def _layout_of_sums(tokens, warps):
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, tokens, 16])


@gluon.constexpr_function
def _layout_of_words(rows, warps, by_scale=False):
    """Of ``[rows, 16]``, or of ``[rows / 32, 32, 2, 8]``: rows as the operand has them.

    Each of four threads holds four words in a row.
    """

    def row(index):
        return [index // 32, index % 32, 0, 0] if by_scale else [index, 0]

    def word(index):
        return [0, 0, index // 8, index % 8] if by_scale else [0, index]

    of_warps = [row(1 << bit) for bit in range(4, rows.bit_length() - 1)]
    held = warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=[word(1), word(2), row(8), *of_warps[held:]],
        lane_bases=[word(4), word(8), row(1), row(2), row(4)],
        warp_bases=of_warps[:held],
        block_bases=[],
        shape=[rows // 32, 32, 2, 8] if by_scale else [rows, 16],
    )


@gluon.constexpr_function
def _layout_of_scales(rows, warps):
    """Of ``[rows / 32, 2]``, a number for each eight words of 32 rows."""
    return gl.SliceLayout(1, gl.SliceLayout(3, _layout_of_words(rows, warps, True)))
