"""Products with MXFP4 weights (kernels.md 0.5, 10.3).

Channels go in fours. A 16-bit word holds the codes of channels 4 i .. 4 i + 3, so a tile of words
expands into four tiles of values, one for each channel modulo 4, without moving anything between
threads; activations lie in memory as four planes likewise (``[rows, 4, K / 4]``), and the order of
a sum's terms does not matter. Values are bf16, exactly, and multiply bf16 activations.

Weights stand on the M side: the expanded tile then is the operand of wgmma that may come from
registers, tokens are the narrow N side, and what shared memory moves is packed bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from leadline.kernels.triton.formats import decode_e2m1, decode_ue8m0, dot_bf16, to_bf16
from leadline.kernels.triton.launch import INTERPRETED

# The assembly wants sm_80 or later; elsewhere Triton's own operations do the same, slower.
_PTX = tl.constexpr(not INTERPRETED and torch.version.hip is None)

# The largest scale byte whose factor 2^(e - 1) a bf16 can hold.
_LARGEST_FACTOR = tl.constexpr(128)


def _nibble(word: str, mask: str, factor: str, multiply: str, out: int) -> str:
    """Two codes of a register, at the same place of its halves, -> two bf16.

    The product puts the magnitude at bits 8..6 and the sign at bit 15, where a bf16 has the same
    number times 2^-126 (a denormal, if need be); copies that fall elsewhere are masked.
    """
    shifted = f"and.b32 t, {word}, {mask}; mul.lo.u32 t, t, {factor};"
    return f"{shifted} and.b32 t, t, 0x81C081C0; {multiply} fma.rn.bf16x2 ${out}, t, $5, minus0;"


def _expansion(multiply: str = "") -> str:
    """PTX: $4 has two words, $5 two bf16 factors; $0 .. $3 get the values, two of each plane.

    Integer instructions are what a 4-bit stream costs: 17 for 8 values here, multiplication
    included, where 40 would halve the bandwidth. The constants want both of a word's bytes in one
    register half, which is why words have 16 bits.
    """
    low = ("0x000F000F", "0x1040")  # << 6 for the magnitude, << 12 for the sign
    high = ("0x00F000F0", "0x0104")  # << 2, << 8
    lines = [
        "{ .reg .b32 t, upper, minus0, normal;",
        "mov.b32 minus0, 0x80008000; mov.b32 normal, 0x7E807E80;",  # -0, 2^126
        "shr.u32 upper, $4, 8;",
        _nibble("$4", *low, multiply, 0),
        _nibble("$4", *high, multiply, 1),
        _nibble("upper", *low, multiply, 2),
        _nibble("upper", *high, multiply, 3),
        "}",
    ]
    return "\n".join(lines)


_EXPAND = tl.constexpr(_expansion())
_EXPAND_WIDE = tl.constexpr(_expansion("fma.rn.bf16x2 t, t, normal, minus0;"))


@triton.jit
def _expand(words, exponents, WIDE: tl.constexpr):
    """Words of four codes and their scale bytes -> four tiles of values.

    Without ``WIDE`` the scale and 2^126 are one factor, which only bytes up to 128 (weights up to
    12) allow; with it there are two multiplications, and every byte is right.
    """
    if not _PTX:
        scale = decode_ue8m0(exponents)
        codes = words.to(tl.int32)
        first, second = decode_e2m1(codes) * scale, decode_e2m1(codes >> 4) * scale
        third, fourth = decode_e2m1(codes >> 8) * scale, decode_e2m1(codes >> 12) * scale
        return to_bf16(first), to_bf16(second), to_bf16(third), to_bf16(fourth)
    if WIDE:
        factors = decode_ue8m0(exponents).to(tl.bfloat16)
    else:
        factors = ((exponents.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)
    return tl.inline_asm_elementwise(
        _EXPAND_WIDE if WIDE else _EXPAND,
        "=&r,=&r,=&r,=&r,r,r",  # outputs are written before the last look at the inputs
        [words, factors],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _load(rows, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A block of columns of some rows of a matrix; zeros beyond its width."""
    if WIDTH % BLOCK != 0:
        return tl.load(rows[:, None] + column[None, :], mask=(column < WIDTH)[None, :], other=0)
    return tl.load(rows[:, None] + column[None, :])


@triton.jit
def _dot(values, planes, column, live, total):
    """One plane's part of a product."""
    x = tl.load(planes[:, None] + column[None, :], mask=live, other=0.0)
    return dot_bf16(values, x.T, total)


@triton.jit
def _product(
    codes,
    scales,
    outputs,
    planes,
    rows,
    live,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``product`` and the largest scale byte that was met."""
    M: tl.constexpr = outputs.shape[0]
    N: tl.constexpr = rows.shape[0]
    QUARTER: tl.constexpr = K // 4
    WORDS: tl.constexpr = BLOCK_K // 4
    SCALES: tl.constexpr = BLOCK_K // 32
    # An asynchronous copy takes four bytes. Where rows of scales are not that regular (a slice of
    # 576 channels has 18 of them), a stage's are loaded while the one before is multiplied.
    AHEAD: tl.constexpr = K % 128 != 0
    word, scale = tl.arange(0, WORDS), tl.arange(0, SCALES)
    codes += outputs * QUARTER
    scales += outputs * (K // 32)
    planes += rows * K
    total = tl.zeros((M, N), tl.float32)
    largest = tl.zeros((M, SCALES), tl.uint8)
    if AHEAD:
        ahead = _load(scales, scale, K // 32, SCALES)
    for start in range(0, QUARTER, WORDS):
        column = start + word
        w = _load(codes, column, QUARTER, WORDS)
        if AHEAD:
            e = ahead
            ahead = _load(scales, start // 8 + SCALES + scale, K // 32, SCALES)
        else:
            e = _load(scales, start // 8 + scale, K // 32, SCALES)
        largest = tl.maximum(largest, e)
        e = tl.broadcast_to(e[:, :, None], (M, SCALES, 8)).reshape(M, WORDS)
        first, second, third, fourth = _expand(w, e, WIDE)
        inside = live[:, None]
        if K % BLOCK_K != 0:
            inside &= (column < QUARTER)[None, :]
        total = _dot(first, planes, column, inside, total)
        total = _dot(second, planes + QUARTER, column, inside, total)
        total = _dot(third, planes + 2 * QUARTER, column, inside, total)
        total = _dot(fourth, planes + 3 * QUARTER, column, inside, total)
    return total, tl.max(largest.to(tl.int32))


@triton.jit
def product(codes, scales, outputs, planes, rows, live, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """``W x^T`` of some rows of an MXFP4 matrix: ``[M, N]`` float32.

    Args:
        codes: pointer to the matrix, ``[out, K / 4]`` words.
        scales: pointer to its scale bytes, ``[out, K / 32]``.
        outputs: ``[M]`` rows of the matrix.
        planes: pointer to activations, ``[rows, 4, K / 4]``.
        rows: ``[N]`` int64 rows of ``planes``.
        live: ``[N]`` bool; others are read as zeros, and cost no bandwidth.
        K: the products' length, a multiple of 32.
        BLOCK_K: part of it that is in a stage.
    """
    total, largest = _product(codes, scales, outputs, planes, rows, live, K, BLOCK_K, False)
    # No trained matrix has weights above 12, so the second pass costs its test only.
    if largest > _LARGEST_FACTOR:
        total, _ = _product(codes, scales, outputs, planes, rows, live, K, BLOCK_K, True)
    return total
