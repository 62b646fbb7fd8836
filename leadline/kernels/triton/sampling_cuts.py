"""Which logits of a row top_k and top_p keep, and which of them a uniform number falls on.

A row is at hand as a list of its best logits, or is read tile by tile, as often as needed. Logits
are compared as keys, integers in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOTHING = tl.constexpr(-0x7F800001)
"""The key of -inf: what is masked, or not there."""

# Interpolates 2^x at the Chebyshev nodes of [-0.5, 0.5], within 2e-15, and is exact at 0.
_EXP2 = tl.constexpr(
    (
        1.0,
        0.6931471805599483,
        0.24022650695901254,
        0.055504108664544756,
        0.00961812911053657,
        0.0013333558214738293,
        0.00015403526882354606,
        1.525266622014565e-05,
        1.3217210256367588e-06,
        1.0206977921453389e-07,
        6.767963482574983e-09,
    )
)


@triton.jit
def key_of(x):
    """Float32 -> int32 in the same order; zeros are equal, NaN is above all."""
    positive_zero = x + 0.0
    bits = positive_zero.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def number_of(key):
    """The inverse of ``key_of``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ranked(key, column):
    """Int64 of logits at columns of a row, in one order: of equal keys the smaller column first."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - column)


@triton.jit
def column_of(packed):
    """The column that ``ranked`` was given; the key is in the upper half."""
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def is_finite(key):
    """Of a number, by its key."""
    return (key < 0x7F800000) & (key > NOTHING)


@triton.jit
def weights(x, best, coldness):
    """``exp((x - best) coldness)`` float64 of float32 up to best, which is finite.

    Within about 1e-14; below 2^-1000 it is 0.
    """
    scale = tl.full([], 1.4426950408889634, tl.float64) * coldness
    origin = best.to(tl.float64)
    # What is far below would only overflow on its way to 0.
    least = tl.maximum(best - 1001.0 / scale.to(tl.float32), -3.4028234663852886e38)
    doublings = (tl.maximum(x, least).to(tl.float64) - origin) * scale
    # Added to 1.5 * 2^52, a number is rounded to an integer, which its last bits then hold.
    shifted = doublings + 6755399441055744.0
    part = doublings - (shifted - 6755399441055744.0)
    series = part * _EXP2[10] + _EXP2[9]
    for n in tl.static_range(8, -1, -1):
        series = series * part + _EXP2[n]
    bits = series.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
    is_there = (x - best) * scale.to(tl.float32) > -1000.0
    return tl.where(is_there, bits.to(tl.float64, bitcast=True), 0.0)


@triton.jit
def weight_of(key, best, coldness):
    """``weights`` of the numbers behind keys."""
    return weights(number_of(key), number_of(best), coldness)


@triton.jit
def rough_weights(x, best, coldness):
    """``weights`` in float32: within 1e-5 where it matters."""
    return tl.exp2((x - best) * (coldness * 1.4426950408889634).to(tl.float32))


@triton.jit
def key_of_share(share, top, temperature):
    """The least key whose weight is at least a share above 0 of the best one's."""
    limit = number_of(top).to(tl.float64) + tl.log(share) * temperature
    nearest = limit.to(tl.float32)
    return key_of(nearest) + (nearest.to(tl.float64) < limit).to(tl.int32)


@triton.jit
def cut_keys(source, low, high, k, p, total, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """What top_k, then top_p, leave: all keys from ``ceiling`` up, and of those from ``floor`` to
    it, which are equal, the first ``ties``.

    Args:
        source: ``(logits, vocab, top, coldness, key, weight, mass, count)`` of the row: keys and
            weights of the list, mass and count of what lies above it.
        low: the least key that is left so far; it is at or below both cuts.
        high: a key above both cuts.
        k: of the row.
        p: of the row.
        total: the mass of the row, of which top_p takes its share, unless top_k cuts before.
        WHOLE: read the row instead of the list.
        TILE: of the row.

    Returns:
        ``floor``, ``ceiling`` and ``ties``.
    """
    floor, high = low.to(tl.int64), high.to(tl.int64)
    above, count = _sums(floor, 0.0, source, WHOLE, TILE)
    ceiling, ties, tie = floor, tl.full([], 0, tl.int64), tl.full([], 0.0, tl.float64)
    if (k > 0) & (count > k):
        floor, ceiling, above, count, tie, equal = _narrow(
            k.to(tl.float64), True, floor, high, above, count, source, WHOLE, TILE
        )
        ties = k - count
    if p < 1:
        goal = p * tl.where(k > 0, above + ties * tie, total)
        goal = tl.maximum(goal, 1e-300)  # the best stays, however small p is
        if goal > above:
            ties = _needed(goal - above, tie, ties)
        else:
            floor, ceiling, above, count, tie, equal = _narrow(
                goal, False, ceiling, high, above, count, source, WHOLE, TILE
            )
            ties = _needed(goal - above, tie, equal)
    return floor, ceiling, ties


@triton.jit
def _narrow(
    goal,
    BY_COUNT: tl.constexpr,
    low,
    high,
    mass_low,
    count_low,
    source,
    WHOLE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The key at which what lies at or above it first reaches a count or a mass.

    Halves the numbers from ``low`` to ``high`` until equal ones or a single one are between them.

    Returns:
        ``low``, ``high``, the mass and count from ``high`` up, the weight of one of the keys
        between them, and how many they are.
    """
    mass_high, count_high = source[6], source[7]
    while (high - low > 1) & (count_low - count_high > 1):
        middle = key_of(0.5 * number_of(low.to(tl.int32)) + 0.5 * number_of(high.to(tl.int32)))
        middle = tl.minimum(tl.maximum(middle.to(tl.int64), low + 1), high - 1)
        mass, count = _sums(middle, 0.0 if BY_COUNT else goal, source, WHOLE, TILE)
        reaches = (count.to(tl.float64) if BY_COUNT else mass) >= goal
        low, high = tl.where(reaches, middle, low), tl.where(reaches, high, middle)
        if not BY_COUNT:
            mass_low = tl.where(reaches, mass, mass_low)
            mass_high = tl.where(reaches, mass_high, mass)
        count_low = tl.where(reaches, count, count_low)
        count_high = tl.where(reaches, count_high, count)
    if BY_COUNT:  # then nothing in the loop needs masses, and the compiler leaves them out
        mass_low, _ = _sums(low, 0.0, source, WHOLE, TILE)
        mass_high, _ = _sums(high, 0.0, source, WHOLE, TILE)
    equal = count_low - count_high
    tie = (mass_low - mass_high) / tl.maximum(equal, 1).to(tl.float64)
    return low, high, mass_high, count_high, tie, equal


@triton.jit
def _needed(mass, weight, most):
    """How many of ``most`` equal weights reach a mass; one at least."""
    wanted = tl.ceil(mass / tl.maximum(weight, 1e-300))
    return tl.minimum(tl.maximum(wanted, 1.0), most.to(tl.float64)).to(tl.int64)


@triton.jit
def _sums(level, goal, source, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """Mass and count of what lies at or above a key.

    Weights of a whole row are taken in float32, unless their sum comes so near to the goal that
    this might decide.
    """
    logits, vocab, top, coldness, key, weight, base_mass, base_count = source
    level = level.to(tl.int32)
    if WHOLE:
        start, mass = 0, tl.full([], 0.0, tl.float64)
        count = tl.full([], 0, tl.int64)
        while start < vocab:
            column = start + tl.arange(0, 4 * TILE)  # enough under way to hide their latency
            logit = tl.load(logits + column, mask=column < vocab, other=float("-inf"))
            is_above = key_of(logit) >= level
            near = tl.where(is_above, rough_weights(logit, number_of(top), coldness), 0.0)
            mass += tl.sum(near, axis=0).to(tl.float64)
            count += tl.sum(is_above.to(tl.int32), axis=0)
            start += 4 * TILE
        if tl.abs(mass - goal) < 1e-5 * goal:
            mass = _exact_mass(level, source, TILE)
    else:
        mass = base_mass + tl.sum(tl.where(key >= level, weight, 0.0), axis=0)
        count = base_count + tl.sum((key >= level).to(tl.int32), axis=0)
    return mass, count


@triton.jit
def _exact_mass(level, source, TILE: tl.constexpr):
    """Mass of what lies at or above a key of a whole row."""
    logits, vocab, top, coldness, _, _, _, _ = source
    start, mass = 0, tl.full([], 0.0, tl.float64)
    while start < vocab:
        key, weight = load_tile(logits, start, vocab, top, coldness, TILE)
        mass += tl.sum(tl.where(key >= level, weight, 0.0), axis=0)
        start += TILE
    return mass


@triton.jit
def sums_of_tiles(source, floor, ceiling, ties, TILE: tl.constexpr, TILES: tl.constexpr):
    """``[TILES]`` mass of what is kept of each tile, and how many ties come before it."""
    logits, vocab, top, coldness, _, _, _, _ = source
    tile = tl.arange(0, TILES)
    masses, before = tl.zeros([TILES], tl.float64), tl.zeros([TILES], tl.int64)
    index, seen = 0, tl.full([], 0, tl.int64)
    while index * TILE < vocab:
        key, weight = load_tile(logits, index * TILE, vocab, top, coldness, TILE)
        kept, num_ties = kept_of(key, seen, floor, ceiling, ties)
        mass = tl.sum(tl.where(kept, weight, 0.0), axis=0)
        masses = tl.where(tile == index, mass, masses)
        before = tl.where(tile == index, seen, before)
        seen += num_ties
        index += 1
    return masses, before


@triton.jit
def load_tile(logits, start, vocab, top, coldness, TILE: tl.constexpr):
    """Keys and weights of a tile of a row."""
    column = start + tl.arange(0, TILE)
    logit = tl.load(logits + column, mask=column < vocab, other=float("-inf"))
    return key_of(logit), weights(logit, number_of(top), coldness)


@triton.jit
def kept_of(key, seen, floor, ceiling, ties):
    """``[n]`` bool: what ``cut_keys`` leaves, ``seen`` ties being before it; and its ties."""
    is_tie = (key >= floor) & (key < ceiling)
    rank = seen + tl.cumsum(is_tie.to(tl.int32), axis=0)
    return (key >= ceiling) | (is_tie & (rank <= ties)), tl.sum(is_tie.to(tl.int32), axis=0)


@triton.jit
def pick(key, weight, target, seen, floor, ceiling, ties):
    """The place at which the sum of kept weights, in the order of ids, exceeds a target."""
    place = tl.arange(0, key.shape[0])
    kept, _ = kept_of(key, seen, floor, ceiling, ties)
    weight = tl.where(kept, weight, 0.0)
    sums = tl.cumsum(weight, axis=0)
    # Something must be added here: rounding may lift a sum where nothing is.
    first = tl.min(tl.where((weight > 0) & (sums > target), place, key.shape[0]), axis=0)
    last = tl.max(tl.where(weight > 0, place, 0), axis=0)
    return tl.minimum(first, last)
