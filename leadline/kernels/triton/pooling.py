"""Rows that become a compressed entry: from the step or from the ring that keeps the last ones."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pool(
    projected,
    row_stride,
    ape,
    ring,
    row,
    position,
    begin,
    channel,
    RATIO: tl.constexpr,
    HALVES: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Softmax of each channel over an entry's rows, newest first; some are loaded at a time."""
    span: tl.constexpr = RATIO * HALVES
    some: tl.constexpr = min(span, 8)
    columns: tl.constexpr = HALVES * WIDTH  # of values, with as many gates behind them
    largest = tl.full(channel.shape, float("-inf"), tl.float32)
    total = tl.zeros(channel.shape, tl.float32)
    pooled = tl.zeros(channel.shape, tl.float32)
    for first in tl.range(0, span, some):
        gates: tl.tuple = ()
        values: tl.tuple = ()
        above = largest
        for turn in tl.static_range(some):
            back = first + turn
            there = (back < span) & (position - back >= 0)
            kept = ring + (position - back) % RING * (2 * columns)
            source = tl.where(row - back < begin, kept, projected + (row - back) * row_stride)
            half = 0
            if HALVES == 2:  # the group before gives its first half, the own one its second
                half = tl.where(back < RATIO, WIDTH, 0)
            gate = tl.load(source + columns + half + channel, mask=there, other=-float("inf"))
            if ape is not None:
                of_row = ape + (RATIO - 1 - back % RATIO) * columns + half
                gate += tl.load(of_row + channel, mask=there, other=0.0)
            gates += (gate,)
            values += (tl.load(source + half + channel, mask=there, other=0.0),)
            above = tl.maximum(above, gate)
        shrink = tl.exp(largest - above)
        total, pooled, largest = total * shrink, pooled * shrink, above
        for turn in tl.static_range(some):
            weight = tl.exp(gates[turn] - above)
            total += weight
            pooled += weight * values[turn]
    return pooled / total


@triton.jit
def refresh_ring(
    projected,
    row_stride,
    ring,
    q_off,
    seq_len,
    request,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    COPIED: tl.constexpr,
):
    """Keep the newest rows of a request, each at its position modulo the ring, some at a time."""
    end = tl.load(q_off + request + 1)
    length = tl.load(seq_len + request)
    channel = tl.arange(0, WIDTH)[None, :]
    row = tl.maximum(tl.load(q_off + request), end - RING)
    while row < end:
        some = row + tl.arange(0, triton.next_power_of_2(COPIED))[:, None]
        value = tl.load(projected + some * row_stride + channel, mask=some < end, other=0.0)
        place = (length - (end - some)) % RING
        tl.store(ring + place * WIDTH + channel, value, mask=some < end)
        row += COPIED
