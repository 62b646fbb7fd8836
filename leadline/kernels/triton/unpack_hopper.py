"""Cache records expanded into shared memory, as Hopper's tensor cores read them.

The same bit moves as in ``unpack``, by instruction: a word of eight E2M1 or four E4M3 becomes pairs
of bf16 in their order, in units of 2^16. A thread expands 16-byte pieces of one row, and eight
neighbouring threads eight rows, so that neither loads nor the swizzled stores collide.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEYS = gl.constexpr(32)
"""Rows of a block."""

HALF = gl.constexpr(256)
"""Channels of half a row: blocks lie in shared memory by halves."""


class Rows(NamedTuple):
    """A block of rows on its way: words and scales of both halves, and which rows there are."""

    left: Any
    left_codes: Any
    right: Any
    right_codes: Any
    tail: Any  # of FP8_64: bf16 for the last words of the right half
    valid: Any


# A word's nibbles n0..n7. x gets n0 n1 n2 n3 in its lower half and n1 n2 n3 n4 in its upper, y the
# same from n4 on: so one shift brings both numbers of a pair to their places.
_EXPAND_FP4 = gl.constexpr("""
{
    .reg .b32 x, y, s, m;
    shl.b32 x, $4, 12;
    prmt.b32 x, $4, x, 0x7610;
    shr.u32 y, $4, 16;
    shr.u32 s, $4, 4;
    prmt.b32 y, y, s, 0x7610;
    shl.b32 s, x, 12;
    shl.b32 m, x, 6;
    and.b32 s, s, 0x80008000;
    lop3.b32 m, m, 0x01C001C0, s, 0xEA;
    mul.rn.bf16x2 $0, m, $5;
    shl.b32 s, x, 4;
    shr.u32 m, x, 2;
    and.b32 s, s, 0x80008000;
    lop3.b32 m, m, 0x01C001C0, s, 0xEA;
    mul.rn.bf16x2 $1, m, $5;
    shl.b32 s, y, 12;
    shl.b32 m, y, 6;
    and.b32 s, s, 0x80008000;
    lop3.b32 m, m, 0x01C001C0, s, 0xEA;
    mul.rn.bf16x2 $2, m, $5;
    shl.b32 s, y, 4;
    shr.u32 m, y, 2;
    and.b32 s, s, 0x80008000;
    lop3.b32 m, m, 0x01C001C0, s, 0xEA;
    mul.rn.bf16x2 $3, m, $5;
}
""")
_EXPAND_FP8 = gl.constexpr("""
{
    .reg .b32 x, s, m;
    prmt.b32 x, $2, 0, 0x1404;
    shr.u32 m, x, 4;
    and.b32 s, x, 0x80008000;
    lop3.b32 m, m, 0x07F007F0, s, 0xEA;
    mul.rn.bf16x2 $0, m, $3;
    prmt.b32 x, $2, 0, 0x3424;
    shr.u32 m, x, 4;
    and.b32 s, x, 0x80008000;
    lop3.b32 m, m, 0x07F007F0, s, 0xEA;
    mul.rn.bf16x2 $1, m, $3;
}
""")


# Four bf16 as two pairs, in units of 2^16.
_TIMES_UNIT = gl.constexpr("""
{
    .reg .b32 low, high, unit;
    mov.b64 {low, high}, $2;
    mov.b32 unit, 0x37803780;
    mul.rn.bf16x2 $0, low, unit;
    mul.rn.bf16x2 $1, high, unit;
}
""")
_FIRST_OF_TAIL = gl.constexpr(48)  # word of the right half


@gluon.constexpr_function
def _num_words(record):
    """32-bit words of half a row."""
    return {"fp4_16": 32, "fp8_32": 64, "fp8_64": 64}[record]


@gluon.constexpr_function
def _num_scales(record):
    """Scales of half a row."""
    return {"fp4_16": 16, "fp8_32": 8, "fp8_64": 4}[record]


@gluon.constexpr_function
def _layout(record, per_scale):
    """Of words ``[keys, words]``, or of ``[keys, scales, words of a scale]``."""
    words = _num_words(record)

    def word(index):
        return [0, index] if per_scale is None else [0, index // per_scale, index % per_scale]

    def key(index):
        return [index, 0] if per_scale is None else [index, 0, 0]

    return gl.DistributedLinearLayout(
        reg_bases=[word(1), word(2), *(word(1 << bit) for bit in range(4, words.bit_length() - 1))],
        lane_bases=[key(1), key(2), key(4), word(4), word(8)],
        warp_bases=[key(8), key(16)],
        block_bases=[],
        shape=[32, words] if per_scale is None else [32, words // per_scale, per_scale],
    )


@gluon.constexpr_function
def of_keys(record):
    """Layout of one number for each row of a block."""
    return gl.SliceLayout(1, _layout(record, None))


@gluon.jit
def load_rows(values, scales, valid, RECORD: gl.constexpr):
    """Start to load rows of 512 channels that begin at these pointers; 0 where not ``valid``."""
    left, left_codes = _load_half(values, scales, valid, 0, RECORD)
    right, right_codes = _load_half(values, scales, valid, 1, RECORD)
    tail = right  # stands in for none
    if RECORD == "fp8_64":
        tail = _load_tail(values, valid)
    return Rows(left, left_codes, right, right_codes, tail, valid)


@gluon.jit
def _load_half(values, scales, valid, SIDE: gl.constexpr, RECORD: gl.constexpr):
    words: gl.constexpr = _num_words(RECORD)
    word = gl.arange(0, words, layout=gl.SliceLayout(0, _layout(RECORD, None))) + SIDE * words
    packed = gl.load(values[:, None] + word[None, :], mask=valid[:, None], other=0)
    count: gl.constexpr = _num_scales(RECORD)
    by_scale: gl.constexpr = gl.SliceLayout(2, _layout(RECORD, words // count))
    by_key: gl.constexpr = gl.SliceLayout(1, by_scale)
    at = SIDE * count + gl.arange(0, count, layout=gl.SliceLayout(0, by_scale))
    at = gl.convert_layout(scales, by_key)[:, None] + at[None, :]
    return packed, gl.load(at, mask=gl.convert_layout(valid, by_key)[:, None], other=0)


@gluon.jit
def _load_tail(values, valid):
    """The 64 channels in bf16 behind 448 codes, each four where a word of their codes would be.

    Words of the last quarter are registers of their own in every thread: no other is loaded.
    """
    word = gl.arange(0, 64, layout=gl.SliceLayout(0, _layout("fp8_64", None)))
    fours = values.to(gl.pointer_type(gl.int64), bitcast=True)[:, None] + (word + 8)[None, :]
    return gl.load(fours, mask=valid[:, None] & (word >= _FIRST_OF_TAIL)[None, :], other=0)


@gluon.jit
def _lay_over(a, b, tail):
    """Pairs ``a`` and ``b`` of each word, those of the tail in place of what its bytes gave."""
    word = gl.arange(0, 64, layout=gl.SliceLayout(0, a.type.layout))[None, :]
    low, high = gl.inline_asm_elementwise(
        _TIMES_UNIT, "=&r,=&r,l", [tail], (gl.int32,) * 2, True, 1
    )
    is_tail = word >= _FIRST_OF_TAIL
    return gl.where(is_tail, low, a), gl.where(is_tail, high, b)


@gluon.jit
def expand(rows, SIDE: gl.constexpr, RECORD: gl.constexpr):
    """Half rows as pairs of bf16 ``[keys, 128]``, int32."""
    packed, codes = rows.left, rows.left_codes
    if SIDE == 1:
        packed, codes = rows.right, rows.right_codes
    words: gl.constexpr = _num_words(RECORD)
    count: gl.constexpr = _num_scales(RECORD)
    scale = gl.expand_dims(_scale_pairs(codes, RECORD), 2)
    scale = gl.reshape(scale.broadcast_to([KEYS, count, words // count]), [KEYS, words])
    scale = gl.convert_layout(scale, _layout(RECORD, None), assert_trivial=True)
    if RECORD == "fp4_16":
        a, b, c, d = gl.inline_asm_elementwise(
            _EXPAND_FP4, "=&r,=&r,=&r,=&r,r,r", [packed, scale], (gl.int32,) * 4, True, 1
        )
        pairs = gl.join(gl.join(a, c), gl.join(b, d))
    else:
        a, b = gl.inline_asm_elementwise(
            _EXPAND_FP8, "=&r,=&r,r,r", [packed, scale], (gl.int32,) * 2, True, 1
        )
        if RECORD == "fp8_64" and SIDE == 1:
            a, b = _lay_over(a, b, rows.tail)
        pairs = gl.join(a, b)
    return gl.reshape(pairs, [KEYS, HALF // 2])


@gluon.jit
def _scale_pairs(codes, RECORD: gl.constexpr):
    """Scales as two equal bf16 each, int32, with the formats' factors; see ``unpack``."""
    code = codes.to(gl.int32)
    if RECORD == "fp4_16":
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        scale = bits.to(gl.float32, bitcast=True) * 2.0**120 * 2.0**110
        scale = gl.where((code & 0x7F) == 0x7F, float("nan"), scale)
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,r", [scale], gl.int32, True, 1
        )
    else:
        raised = code + 104
        scale = gl.where(raised > 254, 0x7FC0, raised << 7)
        pairs = scale | (scale << 16)
    return pairs
