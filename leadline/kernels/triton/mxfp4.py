"""Products with MXFP4 weights (kernels.md 0.5, 10.3).

Channels go in fours. A 16-bit word holds the codes of channels 4 i .. 4 i + 3, so a tile of words
expands into four tiles of values, one for each channel modulo 4, without moving anything between
threads; activations lie in memory as four planes likewise (``plane_offset``), and the order of a
sum's terms does not matter. Values are bf16, exactly, and multiply bf16 activations.

Weights stand on the M side: the expanded tile then is the operand that comes from registers,
tokens are the narrow N side, and what shared memory moves is packed bytes.

* Tiles of up to 16 tokens stream, eight at a time: mma.sync leaves the order of instructions to the
  assembler, where wgmma has every warp wait for each product's end. A thread holds eight words in a
  row, one block of 32 channels, hence one scale.
* Larger ones: wgmma, and mma.sync for what is left of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from leadline.kernels.triton.formats import decode_e2m1, decode_ue8m0, dot_bf16, to_bf16
from leadline.kernels.triton.launch import INTERPRETED

# The assembly wants sm_80 or later; elsewhere Triton's own operations do the same, slower.
_PTX = tl.constexpr(not INTERPRETED and torch.version.hip is None)


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


EXPAND = tl.constexpr(_expansion())
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
        _EXPAND_WIDE if WIDE else EXPAND,
        "=&r,=&r,=&r,=&r,r,r",  # outputs are written before the last look at the inputs
        [words, factors],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def plane_offset(channel, K: tl.constexpr, STREAMED: tl.constexpr):
    """Where a channel lies in a row of activations.

    Streaming products read 64 words of a plane in the order in which mma.sync takes them, so that
    what a thread reads at once is what it multiplies at once. Else each would cost two moves more.
    """
    word = channel // 4
    if STREAMED and K % 256 == 0:
        half, owner, pair = word // 32 % 2, word // 8 % 4, word // 2 % 4
        word = word // 64 * 64 + owner * 16 + pair * 4 + half * 2 + word % 2
    return channel % 4 * (K // 4) + word


@triton.jit
def _load(pointers, index, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Words or scales at ``index`` of their rows; zeros beyond ``WIDTH`` unless none are."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=index < WIDTH, other=0)


@triton.jit
def _activations(planes, rows, plane, word, K: tl.constexpr, EVEN: tl.constexpr):
    """Words of planes, both ``[1, ..]``, of some rows, zeros where there is none."""
    inside = (rows >= 0)[:, None]
    if not EVEN:
        inside &= word < K // 4
    return tl.load(planes + (rows * K)[:, None] + plane * (K // 4) + word, mask=inside, other=0.0)


@triton.jit
def _stream(values, planes, rows, start, total, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """All of a stage's values times eight rows of activations."""
    at = tl.arange(0, BLOCK_K)[None, :]
    plane, word = at // (BLOCK_K // 4), start + at % (BLOCK_K // 4)
    x = _activations(planes, rows, plane, word, K, K % BLOCK_K == 0)
    if K % 256 == 0:  # the inverse of ``plane_offset``
        x = x.reshape(8, BLOCK_K // 64, 4, 4, 2, 2).permute(0, 1, 4, 2, 3, 5).reshape(8, BLOCK_K)
    return dot_bf16(values, x.T, total)


@triton.jit
def _product(
    codes,
    scales,
    outputs,
    planes,
    rows,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STREAMED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``product`` and whether a scale byte of 128 or more was met."""
    M: tl.constexpr = outputs.shape[0]
    N: tl.constexpr = rows.shape[0]
    WORDS: tl.constexpr = BLOCK_K // 4
    GROUPS: tl.constexpr = BLOCK_K // 32
    EVEN: tl.constexpr = K % BLOCK_K == 0
    # An asynchronous copy takes four bytes. Where rows of scales are not that regular (a slice of
    # 576 channels has 18 of them), a stage's are loaded while the one before is multiplied.
    AHEAD: tl.constexpr = K % 128 != 0
    word, group = tl.arange(0, WORDS)[None, :], tl.arange(0, GROUPS)[None, :]
    codes += (outputs * (K // 4))[:, None] + word
    scales += (outputs * (K // 32))[:, None] + group
    total = tl.zeros((M, N), tl.float32)
    seen = tl.zeros((M, GROUPS), tl.uint8)
    if STREAMED and N == 16:
        rows, others = tl.split(rows.reshape(2, 8).permute(1, 0))
        total = tl.zeros((M, 8), tl.float32)
        total_of_others = tl.zeros((M, 8), tl.float32)
    if AHEAD:
        ahead = _load(scales, group, K // 32, False)
    for start in range(0, K // 4, WORDS):
        w = _load(codes + start, start + word, K // 4, EVEN)
        if AHEAD:
            e = ahead
            after = start // 8 + GROUPS
            ahead = _load(scales + after, after + group, K // 32, False)
        else:
            e = _load(scales + start // 8, start // 8 + group, K // 32, EVEN)
        seen |= e
        e = tl.broadcast_to(e[:, :, None], (M, GROUPS, 8)).reshape(M, WORDS)
        first, second, third, fourth = _expand(w, e, WIDE)
        if STREAMED:
            values = tl.join(tl.join(first, second), tl.join(third, fourth))
            values = values.permute(0, 3, 2, 1).reshape(M, BLOCK_K)
            total = _stream(values, planes, rows, start, total, K, BLOCK_K)
            if N == 16:
                total_of_others = _stream(
                    values, planes, others, start, total_of_others, K, BLOCK_K
                )
        else:
            total = dot_bf16(first, _activations(planes, rows, 0, start + word, K, EVEN).T, total)
            total = dot_bf16(second, _activations(planes, rows, 1, start + word, K, EVEN).T, total)
            total = dot_bf16(third, _activations(planes, rows, 2, start + word, K, EVEN).T, total)
            total = dot_bf16(fourth, _activations(planes, rows, 3, start + word, K, EVEN).T, total)
    if STREAMED and N == 16:
        total = tl.join(total, total_of_others).permute(0, 2, 1).reshape(M, N)
    return total, tl.max(seen.to(tl.int32)) > 127


@triton.jit
def product(
    codes,
    scales,
    outputs,
    planes,
    rows,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STREAMED: tl.constexpr,
):
    """``W x^T`` of some rows of an MXFP4 matrix: ``[M, N]`` float32.

    Args:
        codes: pointer to the matrix, ``[out, K / 4]`` words.
        scales: pointer to its scale bytes, ``[out, K / 32]``.
        outputs: ``[M]`` rows of the matrix.
        planes: pointer to activations, ``[rows, K]``, laid out by ``plane_offset``.
        rows: ``[N]`` int64 rows of ``planes``; -1 counts as zeros, and costs no bandwidth.
        K: the products' length, a multiple of 32.
        BLOCK_K: part of it that is in a stage, a multiple of 256 if it streams.
        STREAMED: N is 8 or 16, and ``planes`` are laid out for that.
    """
    # Of 576 channels, stages of 128 leave less over.
    STAGE: tl.constexpr = BLOCK_K if K % 256 == 0 else min(BLOCK_K, 128)
    total, is_wide = _product(codes, scales, outputs, planes, rows, K, STAGE, STREAMED, False)
    # No trained matrix has weights of 8 or more, so the second pass costs its test only.
    if is_wide:
        total, _ = _product(codes, scales, outputs, planes, rows, K, STAGE, STREAMED, True)
    return total
