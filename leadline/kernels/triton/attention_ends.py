"""Beginning and end of a row in ``attention_hopper``: queries in, outputs out (Hopper, Gluon).

Queries turn in shared memory. Outputs turn back in registers, are rounded and stored; as MXFP8 too,
for an output projection that takes its input so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from leadline.kernels.triton.attention_keys import HALF
from leadline.kernels.triton.formats import ENCODE_E4M3

WIDTH = gl.constexpr(512)
"""Channels that the kernel is made for."""

ROTATED = gl.constexpr(64)
"""The last of them, which turn."""

HEADS = gl.constexpr(64)
"""Of a program; the last one stands in for those that are missing."""

SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
"""Layout of a half of the outputs, ``[HEADS, HALF]``."""

OF_SUMS = gl.constexpr(gl.SliceLayout(1, SUMS.value))
"""Of one number for each head."""

_COALESCED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_FLOOR = gl.constexpr(0x38D1B717)  # 1e-4, as bits of a float32
_INVERSE_448 = gl.constexpr(1 / 448)
_BF16 = gl.constexpr(gl.NVMMASharedLayout(128, 16))


class Ends(NamedTuple):
    """Tensors of a row's beginning and end."""

    q: Any
    cos: Any
    sin: Any
    sink: Any
    out: Any
    partial: Any
    tops: Any
    totals: Any
    lse: Any
    codes: Any
    exponents: Any


@gluon.jit
def start_query(query, ends, row, num_heads, q_row, q_head):
    """Begin to copy a row's queries into shared memory."""
    head = gl.program_id(2) * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, _COALESCED))
    at = ends.q + row * q_row + gl.minimum(head, num_heads - 1)[:, None] * q_head
    channel = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, _COALESCED))
    async_copy.async_copy_global_to_shared(query.index(0), at + channel[None, :])
    async_copy.commit_group()


@gluon.jit
def finish_query(query, ends, row):
    """Turn the last channels of queries that were copied."""
    async_copy.wait_group(0)
    parts = query._reinterpret(gl.bfloat16, [WIDTH // 64, HEADS, 64], _BF16)
    last = parts.index(WIDTH // 64 - 1)
    turned = _rotate(last.load(_COALESCED).to(gl.float32), ends.cos, ends.sin, row, False)
    last.store(turned.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def store_partial(sums, partial, row, num_heads, SIDE: gl.constexpr):
    """Half of what a split found, to be merged."""
    head = gl.program_id(2) * HEADS + gl.arange(0, HEADS, layout=OF_SUMS)
    channel = SIDE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, SUMS))
    at = (row * gl.num_programs(1) + gl.program_id(1)) * num_heads + head
    at = partial + at[:, None] * WIDTH + channel[None, :]
    gl.store(at, sums, mask=(head < num_heads)[:, None])


@gluon.jit
def store(x, ends, row, num_heads, SIDE: gl.constexpr):
    """Half of a row's outputs, 64 channels at a time; the last of all are turned back."""
    head = gl.program_id(2) * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, _COALESCED))
    channel = SIDE * HALF + gl.arange(0, 64, layout=gl.SliceLayout(0, _COALESCED))
    is_head = (head < num_heads)[:, None]
    at = (row * num_heads + head[:, None]) * WIDTH + channel[None, :]
    left, right = _halves(x)
    a, b = _halves(left)
    c, d = _halves(right)
    if SIDE == 1:
        d = _rotate(d, ends.cos, ends.sin, row, True)
    parts = (a, b, c, d)
    for part in gl.static_range(4):
        value = gl.convert_layout(parts[part].to(gl.bfloat16), _COALESCED)
        gl.store(ends.out + at + part * 64, value, mask=is_head, cache_modifier=".cs")
        if ends.codes is not None:
            code, exponent = _encode_fp8(value.to(gl.float32))
            gl.store(ends.codes + at + part * 64, code, mask=is_head, cache_modifier=".cs")
            _store_exponents(exponent, ends, row, num_heads, SIDE * HALF + part * 64)


@gluon.jit
def _encode_fp8(x):
    """``[n, 64]`` to MXFP8, as ``formats`` does: codes, and exponents ``[n, 2]``."""
    blocks = gl.reshape(x, [x.shape[0], 2, 32])
    # Bits of magnitudes have the order of these, and those of NaN are above all.
    largest = gl.max(blocks.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    largest = gl.maximum(largest, _FLOOR).to(gl.float32, bitcast=True)
    bits = (largest * _INVERSE_448).to(gl.int32, bitcast=True)
    exponent = ((gl.minimum(bits, 0x7F800000) + 0x7FFFFF) >> 23) & 0xFF
    inverse = gl.where(exponent == 255, 0x7FC00000, (254 - exponent) << 23)
    scaled = blocks * inverse.to(gl.float32, bitcast=True)[:, :, None]
    code = gl.inline_asm_elementwise(ENCODE_E4M3, "=r,r,r,r,r", [scaled], gl.uint8, True, 4)
    return gl.convert_layout(gl.reshape(code, x.shape), x.type.layout), exponent


@gluon.jit
def _store_exponents(exponent, ends, row, num_heads, channel):
    """Those of the 64 channels from ``channel`` on."""
    of_exponents: gl.constexpr = exponent.type.layout
    head = gl.program_id(2) * HEADS
    head += gl.arange(0, HEADS, layout=gl.SliceLayout(1, of_exponents))
    block = channel // 32 + gl.arange(0, 2, layout=gl.SliceLayout(0, of_exponents))
    at = ends.exponents + (row * num_heads + head[:, None]) * (WIDTH // 32) + block[None, :]
    gl.store(at, exponent.to(gl.uint8), mask=(head < num_heads)[:, None])


@gluon.jit
def _halves(x):
    """Left and right columns, which each thread has of its own."""
    return gl.split(gl.permute(gl.reshape(x, [HEADS, 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def _rotate(x, cos, sin, row, BACK: gl.constexpr):
    """Adjacent channels of ``[n, 64]`` as complex numbers, turned or turned back."""
    pairs: gl.constexpr = x.shape[1] // 2
    even, odd = gl.split(gl.reshape(x, [x.shape[0], pairs, 2]))
    pair = row * pairs + gl.arange(0, pairs, layout=gl.SliceLayout(0, even.type.layout))
    turn_cos, turn_sin = gl.load(cos + pair)[None, :], gl.load(sin + pair)[None, :]
    if BACK:
        turn_sin = -turn_sin
    turned = gl.join(even * turn_cos - odd * turn_sin, even * turn_sin + odd * turn_cos)
    return gl.convert_layout(gl.reshape(turned, x.shape), x.type.layout)
