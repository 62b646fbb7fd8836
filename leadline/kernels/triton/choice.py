"""The k largest of the numbers that a program holds, and the PTX that finds them fast.

A number is looked for that k of them reach. Each try is an addition that saturates and one that
counts, for each number, and one barrier: sums of warps go through 32 words of shared memory.
Without PTX (under the interpreter, and for float32, whose 32 bits are no float's whole numbers)
the same is done by comparisons and reductions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leadline.kernels.triton.launch import has_ptx


@triton.jit
def _least_and_largest(least, largest, other_least, other_largest):
    return tl.minimum(least, other_least), tl.maximum(largest, other_largest)


@triton.jit
def extremes(keys):
    """The least and the largest key ``[n]``, as integers."""
    least, largest = tl.reduce((keys, keys), 0, _least_and_largest)
    if keys.dtype == tl.float32:
        least, largest = least.to(tl.int32), largest.to(tl.int32)
    return least, largest


@triton.jit
def load_keys(values, count, first, VECTOR: tl.constexpr):
    """Numbers that order as the values do; 0 for NaN, -inf and what does not exist."""
    place = first[:, None] + tl.arange(0, VECTOR)[None, :]
    x = tl.load(values + place, mask=(place >= 0) & (place < count), other=-float("inf"))
    x = x.to(tl.float32) + 0.0  # one zero
    x = tl.where(x == x, x, -float("inf"))
    bits = x.to(tl.int32, bitcast=True)
    if values.dtype.element_ty == tl.bfloat16:
        bits ^= (bits >> 31) & 0x7FFF0000
        return bits.to(tl.float32) * 2.0**-16 + 32641.0
    else:  # noqa: RET505  # a compiled function has one type of result
        bits ^= (bits >> 31) & 0x7FFFFFFF
        return bits.to(tl.uint32, bitcast=True) + 0x7F800001


@triton.constexpr_function
def _counting(n):
    """PTX that counts which of a thread's n keys reach a number, and adds those of its warp."""
    counts = "".join(
        f"add.sat.f32 one, ${n + i}, ${2 * n}; add.f32 count{i % 4}, count{i % 4}, one;"
        for i in range(n)
    )
    return f"""{{
        .reg .f32 one, count<4>;
        .reg .b32 sum, lane, at;
        .reg .pred first;
        {"".join(f"mov.f32 count{i}, 0f00000000;" for i in range(4))}
        {counts}
        add.f32 count0, count0, count1;
        add.f32 count2, count2, count3;
        add.f32 count0, count0, count2;
        cvt.rzi.s32.f32 sum, count0;
        redux.sync.add.s32 sum, sum, 0xFFFFFFFF;
        mov.u32 lane, %tid.x;
        shr.u32 at, lane, 5;
        mad.lo.u32 at, at, 4, ${3 * n};
        and.b32 lane, lane, 31;
        setp.eq.u32 first, lane, 0;
        @first st.shared.b32 [at], sum;
        {"".join(f"mov.b32 ${i}, 0;" for i in range(n))}
    }}"""


@triton.constexpr_function
def _constraints(n):
    return ",".join(["=r"] * n + ["f"] * 2 * n + ["r"] * n)


_TOTAL = tl.constexpr("""{
    .reg .b32 lane, at, part;
    .reg .pred filled;
    mov.u32 lane, %tid.x;
    and.b32 lane, lane, 31;
    mov.u32 part, 0;
    mov.u32 at, %ntid.x;
    shr.u32 at, at, 5;
    setp.lt.u32 filled, lane, at;
    mad.lo.u32 at, lane, 4, $1;
    bar.sync 0;
    @filled ld.shared.b32 part, [at];
    redux.sync.add.s32 $0, part, 0xFFFFFFFF;
}""")


@triton.jit
def _scratch():
    """Address of two times 32 words of shared memory."""
    return tl.inline_asm_elementwise(
        "{ .shared .align 256 .b8 partial[256]; mov.u32 $0, partial; }",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _reach(keys, least, scratch, THREADS: tl.constexpr):
    """How many keys are at least so large."""
    SIZE: tl.constexpr = keys.shape[0] * keys.shape[1]
    if keys.dtype == tl.float32 and has_ptx() and SIZE >= THREADS:
        N: tl.constexpr = SIZE // THREADS
        excess, _ = tl.broadcast(1.0 - least.to(tl.float32), keys)
        at, _ = tl.broadcast(scratch, keys)
        tl.inline_asm_elementwise(
            _counting(N), _constraints(N), [keys, excess, at], tl.int32, is_pure=False, pack=N
        )
        return tl.inline_asm_elementwise(
            _TOTAL, "=r,r", [scratch], dtype=tl.int32, is_pure=False, pack=1
        )
    return tl.sum(tl.sum((keys >= least.to(keys.dtype)).to(tl.int32), axis=1))


@triton.jit
def _which(keys, least):
    """A bit for each key of a row that is at least so large."""
    VECTOR: tl.constexpr = keys.shape[1]
    bit = (1 << tl.arange(0, VECTOR))[None, :]
    if keys.dtype == tl.float32 and has_ptx():
        excess, _ = tl.broadcast(1.0 - least.to(tl.float32), keys)
        reached = tl.inline_asm_elementwise(
            "add.sat.f32 $0, $1, $2;", "=f,f,f", [keys, excess], tl.float32, is_pure=True, pack=1
        )
        return tl.sum(reached * bit.to(tl.float32), axis=1).to(tl.int32)
    return tl.sum(tl.where(keys >= least.to(keys.dtype), bit, 0), axis=1)


@triton.jit
def _count_bits(x):
    """Of numbers below 256."""
    x = (x & 0x55) + ((x >> 1) & 0x55)
    x = (x & 0x33) + ((x >> 2) & 0x33)
    return (x & 0x0F) + (x >> 4)


@triton.jit
def _store(out, slot, first, taken, VECTOR: tl.constexpr):
    """Store ``first`` plus the place of each bit in ``taken`` at ``slot`` and behind it."""
    if has_ptx():
        # As often as a warp needs; and ``tl.store`` would bring everything into another order.
        base, _ = tl.broadcast(out.to(tl.int64), slot)
        tl.inline_asm_elementwise(
            """{
                .reg .pred none;
                .reg .b32 rest, less, place;
                .reg .b64 at, value;
                mov.b32 rest, $4;
                mad.wide.s32 at, $2, 8, $1;
            next:
                setp.eq.b32 none, rest, 0;
                @none bra done;
                sub.u32 less, rest, 1;
                lop3.b32 place, rest, less, 0, 0x0C;
                popc.b32 place, place;
                and.b32 rest, rest, less;
                add.u32 place, place, $3;
                cvt.u64.u32 value, place;
                st.global.b64 [at], value;
                add.s64 at, at, 8;
                bra next;
            done:
                mov.b32 $0, 0;
            }""",
            "=r,l,r,r,r",
            [base, slot, first, taken],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        for i in tl.static_range(VECTOR):
            here = (taken >> i) & 1
            tl.store(out + slot, (first + i).to(tl.int64), mask=here > 0)
            slot += here


@triton.jit
def choose(
    keys,
    first,
    floor,
    ceiling,
    NEAR: tl.constexpr,
    k,
    out,
    blocks,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Store the places of the k largest keys in their order, -1 behind; of equals the later ones.

    A row of ``keys`` lies at ``first`` and behind it. ``floor`` is 0, or a key that at least k
    reach; none is above ``ceiling``. Returns a floor of the members of what is chosen. NEAR says
    that hardly more than k are expected to reach it.
    """
    VECTOR: tl.constexpr = keys.shape[1]
    scratch = 0
    if has_ptx():
        scratch = _scratch()
    floor = tl.maximum(floor, 1) - 1  # so that it rises, and ``reached`` becomes known
    reached, above = k, 0  # how many reach the floor, and more than the ceiling
    step = (ceiling - floor + 1) // 2
    strides = NEAR  # ever longer ones, until one is too long; from there on, and otherwise, halves
    if NEAR:
        step = tl.minimum(step, 2)
    while floor < ceiling:
        middle = floor + tl.minimum(step, ceiling - floor)
        reach = _reach(keys, middle, scratch, THREADS)
        scratch ^= 128
        strides = strides & (reach >= k)
        reached = tl.where(reach >= k, reach, reached)
        above = tl.where(reach < k, reach, above)
        floor = tl.where(reach >= k, middle, floor)
        ceiling = tl.where(reach > k, ceiling, tl.where(reach == k, middle, middle - 1))
        step = tl.where(strides, step * 2, (ceiling - floor + 1) // 2)
    # Where nothing reaches a floor above 0, what does not exist equals it.
    skipped = tl.where(floor > 0, reached - k, 1 << 14)
    filled = tl.where(floor > 0, k, above)
    larger = _which(keys, floor + 1)
    equal = _which(keys, floor) ^ larger
    both = _count_bits(larger) + (_count_bits(equal) << 16)  # in one: neither exceeds 2^14
    before = tl.cumsum(both, axis=0) - both
    left_out = skipped - (before >> 16)
    for i in tl.static_range(VECTOR):
        equal = tl.where(left_out > i, equal & (equal - 1), equal)
    taken = larger | equal
    slot = (before & 0xFFFF) + tl.maximum(-left_out, 0)
    if blocks is not None:
        block = tl.load(blocks + first // BLOCK_SIZE, mask=taken > 0, other=0)
        first = block.to(tl.int32) * BLOCK_SIZE + first % BLOCK_SIZE
    _store(out, slot, first, taken, VECTOR)
    slot = tl.arange(0, WIDTH)
    tl.store(out + slot, tl.full((WIDTH,), -1, tl.int64), mask=(slot >= filled) & (slot < k))
    return floor
