"""Products of few tokens with FP8 weights as stored, on FP8 tensor cores (kernels.md 9 and 11).

A decode step waits for the weights' bytes. Turned into bf16 they keep the integer units busy for
most of the time in which they arrive; here they go from memory to the tensor cores untouched.
Tokens meet them as E4M3 codes (``operand``), made by a launch before or, of few tokens, by each
program for its channels. Sums over channels of different scales are kept apart: a token has a
column for each of the blocks of a step, which holds zeros in place of the others.

NVIDIA only, from sm_90 on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.batch_invariance import planned_rows
from leadline.kernels.packed import PackedWeight
from leadline.kernels.triton.formats import cast, decode_e4m3, decode_ue8m0
from leadline.kernels.triton.launch import INTERPRETED, hold_next, overlapped, processors
from leadline.kernels.triton.operand import Operand, encode_columns, encoding_for

_NATIVE = tl.constexpr(not INTERPRETED)


@dataclass(frozen=True, slots=True)
class _Tile:
    """What one program multiplies at a time, at most so many lines of codes."""

    lines: int
    channels: int
    num_stages: int


# Long steps wait less often, short ones leave room for more programs on a multiprocessor.
_LONG = _Tile(16, 256, num_stages=3)
_TILES = (
    _Tile(32, 128, num_stages=4),
    _Tile(64, 128, num_stages=3),
)
_ROWS = 64
_RESIDENT = 3  # programs of a multiprocessor
_LEAST_COLUMNS = 16  # of FP8 matrix instructions that read both operands from shared memory
_MOST_ENCODED = 4  # tokens on their way; of more, a launch before costs less
_LEAST_ENCODED = 4  # tokens on their way: one a warp, so that a scale's channels lie in one


def streams(tokens: int, weight: PackedWeight) -> bool:
    """Whether ``streamed_matmul`` is the fastest way, on a GPU that has it."""
    if weight.aligned:
        return tokens <= (256 if weight.quantizes_input else 64)
    return tokens <= (8 if weight.quantizes_input else 4)


def encodes(tokens: int, weight: PackedWeight) -> bool:
    """Whether ``streamed_matmul`` had better be given tokens as they are.

    Each program then encodes them, which hides behind the first weights to come: where programs
    take turns, as those of 32768 rows do, later ones delay theirs.
    """
    return tokens <= _MOST_ENCODED and _row_blocks(weight) <= _resident(weight.codes.device)


def _row_blocks(weight: PackedWeight) -> int:
    groups, rows, _ = weight.codes.shape
    return groups * triton.cdiv(rows, _ROWS)


def _resident(device: torch.device) -> int:
    """Programs that a GPU runs at a time."""
    return _RESIDENT * processors(device)


def streamed_matmul(x: Tensor | Operand, weight: PackedWeight) -> Tensor:
    """``x W^T`` for each group, in parts yet to be added.

    Args:
        x: at least one token, bf16 ``[m, G, in]`` with adjacent channels, or as ``encode`` makes it
            of that for this weight, with the same result.
        weight: as ``packed_matmul`` takes it.

    Returns:
        ``[parts, m, G, out]`` float32, or bf16 where there is one part.
    """
    groups, rows, width = weight.codes.shape
    terms, block = encoding_for(weight)
    if isinstance(x, Operand):
        tokens = x.codes.shape[1] // terms
        values, powers = x.codes.view(torch.float8_e4m3fn), x.powers
        strides = x.codes.stride(1), x.codes.stride(0)
    else:
        tokens, values, powers = len(x), x, None
        strides = x.stride(0), x.stride(1)
    row_blocks, resident = _row_blocks(weight), _resident(weight.codes.device)
    planned = planned_rows(tokens)
    lines = triton.next_power_of_2(planned) * terms
    # Of blocks of 32, more than 4 lines would have too many columns in a long step.
    if lines <= _LONG.lines * block // 128 and row_blocks <= resident:
        tile = _LONG
    else:
        tile = next((tile for tile in _TILES if tile.lines >= lines), _TILES[-1])
    lines = max(min(lines, tile.lines), _LEAST_COLUMNS * block // tile.channels)
    line_blocks = triton.cdiv(tokens * terms, lines)
    encoded = 0
    if powers is None:
        encoded = min(max(triton.next_power_of_2(tokens), _LEAST_ENCODED), lines // terms)
    steps = triton.cdiv(width, tile.channels)
    most = max(resident // (row_blocks * triton.cdiv(planned * terms, lines)), 1)
    splits = next(n for n in range(min(most, steps), 0, -1) if steps % n == 0)

    dtype = torch.float32 if splits > 1 else torch.bfloat16
    parts = weight.codes.new_empty(splits, tokens, groups, rows, dtype=dtype)
    _stream[(line_blocks, row_blocks, splits)](
        values,
        powers,
        weight.codes.view(torch.float8_e4m3fn),
        weight.scales,
        parts,
        *strides,
        tokens,
        rows,
        WIDTH=width,
        GROUPS=groups,
        STEPS=steps // splits,
        TERMS=terms,
        INPUT_BLOCK=weight.input_block,
        ENCODED=encoded,
        LINES=lines,
        SCALED=block,
        BLOCK_N=_ROWS,
        BLOCK_K=tile.channels,
        num_warps=4,
        num_stages=tile.num_stages,
        **overlapped(),
    )
    return parts


@triton.jit(do_not_specialize=["num_tokens"])
def _stream(
    x,
    powers,
    codes,
    scales,
    parts,
    x_stride,
    x_group_stride,
    num_tokens,
    num_rows,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
    TERMS: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    ENCODED: tl.constexpr,
    LINES: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A block of lines by a block of a group's rows, over one part of the input.

    ``x`` has an operand's codes, or ``ENCODED`` tokens of a block in bf16, and ``powers`` is None.
    """
    BLOCKS: tl.constexpr = BLOCK_K // SCALED
    COLUMNS: tl.constexpr = BLOCKS * LINES
    TOKENS: tl.constexpr = LINES // TERMS
    x_columns: tl.constexpr = (WIDTH + SCALED - 1) // SCALED
    tile_columns: tl.constexpr = (WIDTH + 31) // 32
    row_blocks = tl.cdiv(num_rows, BLOCK_N)
    tile_rows = tl.cdiv(num_rows, 32)
    group, row_block = tl.program_id(1) // row_blocks, tl.program_id(1) % row_blocks
    split = tl.program_id(2)
    row = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_K)

    stored_row = tl.minimum(row, num_rows - 1)
    at_code = codes + (group * num_rows + stored_row)[:, None].to(tl.int64) * WIDTH + channel
    at_x = x + group.to(tl.int64) * x_group_stride + channel
    tile = tl.minimum(row_block * (BLOCK_N // 32) + tl.arange(0, BLOCK_N // 32), tile_rows - 1)
    at_scale = scales + (group * tile_rows + tile)[:, None] * tile_columns
    tile_column = tl.arange(0, BLOCKS)[None, :] * (SCALED // 32)
    first = split * STEPS * BLOCK_K
    if ENCODED:
        token = tl.program_id(0) * TOKENS + tl.arange(0, ENCODED)
        live = (token < num_tokens)[:, None]
        at_x += token[:, None].to(tl.int64) * x_stride
        end = tl.minimum(first + STEPS * BLOCK_K, WIDTH)
    else:
        column = tl.arange(0, COLUMNS)
        block, line = column // LINES, tl.program_id(0) * LINES + column % LINES
        num_lines = num_tokens * TERMS
        live = line < num_lines
        own = live[:, None] & (channel[None, :] // SCALED == block[:, None])
        at_x += line[:, None].to(tl.int64) * x_stride
        at_power = powers + group * x_columns * num_lines + line
    hold_next()
    sums = tl.zeros((BLOCK_N // 32, 32, COLUMNS), tl.float32)
    # Scales are loaded one step ahead: these are too few for the pipeline that fetches the codes.
    exponents = tl.load(at_scale + tl.minimum(first // 32 + tile_column, tile_columns - 1))
    if ENCODED:
        # So are values, to be encoded while the weights of their step are on their way.
        value = tl.load(at_x + first, mask=live & (first + channel < end), other=0.0)
    else:
        power_at = at_power + tl.minimum(first // SCALED + block, x_columns - 1) * num_lines
        power = tl.load(power_at, mask=live, other=0.0)
    for step in tl.range(0, STEPS):
        start = first + step * BLOCK_K
        following = start + BLOCK_K
        if ENCODED:
            x_code, power = encode_columns(value, LINES, TERMS, INPUT_BLOCK, SCALED)
            value = tl.load(at_x + following, mask=live & (following + channel < end), other=0.0)
        elif WIDTH % BLOCK_K == 0:
            x_code = tl.load(at_x + start, mask=own, other=0.0)
        else:
            x_code = tl.load(at_x + start, mask=own & (start + channel < WIDTH), other=0.0)
        if WIDTH % BLOCK_K == 0:
            code = tl.load(at_code + start)
        else:
            code = tl.load(at_code + start, mask=start + channel < WIDTH, other=0.0)
        # Tiles of larger scales hold zeros, or loading refuses them.
        scale = decode_ue8m0(tl.minimum(exponents, 154))
        factor = scale[:, :, None] * power.reshape(1, BLOCKS, LINES)
        exponents = tl.load(at_scale + tl.minimum(following // 32 + tile_column, tile_columns - 1))
        if not ENCODED:
            power_at = at_power + tl.minimum(following // SCALED + block, x_columns - 1) * num_lines
            power = tl.load(power_at, mask=live, other=0.0)
        product = _dot_e4m3(code, x_code.T).reshape(BLOCK_N // 32, 32, COLUMNS)
        sums += product * factor.reshape(BLOCK_N // 32, 1, COLUMNS)
    sums = tl.sum(sums.reshape(BLOCK_N, BLOCKS, LINES), 1)
    sums = tl.sum(sums.reshape(BLOCK_N, TOKENS, TERMS), 2).T
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    at = ((split * num_tokens + token).to(tl.int64) * GROUPS + group)[:, None] * num_rows + row
    inside = (token < num_tokens)[:, None] & (row < num_rows)
    tl.store(parts + at, cast(sums, parts.dtype.element_ty), mask=inside)


@triton.jit
def _dot_e4m3(a, b):
    """E4M3 values ``[m, k]`` and ``[k, n]`` -> float32."""
    if not _NATIVE:
        a, b = decode_e4m3(a.to(tl.uint8, bitcast=True)), decode_e4m3(b.to(tl.uint8, bitcast=True))
    return tl.dot(a, b, input_precision="ieee")
