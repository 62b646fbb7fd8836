"""Sampling: logits to token ids in two launches (kernels.md 14).

Rows are cut into tiles of a fixed size, so that a row's result does not depend on how many rows
there are. Weights are ``exp((logit - best) / temperature)`` in float64, exact to about 1e-14: a
token differs from the definition's where its uniform number, or a border of min_p or top_p, lies
that close to a sum of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.reference import sampling as reference

_TILE = 4096
_LISTED = 256  # the best of a tile that are listed; all but flat distributions need no more
_NOTHING = tl.constexpr(-0x7F800001)  # the key of -inf: what is masked, dropped or not there
_EXP2_SERIES = tl.constexpr(tuple(math.log(2) ** n / math.factorial(n) for n in range(12)))


def _in_float32(definition: Callable[..., Tensor]) -> Callable[..., Any]:
    """Logits of another dtype take the definition."""

    def decorate(fast: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(fast)
        def call(logits_RV: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            run = fast if logits_RV.dtype == torch.float32 else definition
            return run(logits_RV, *args, **kwargs)

        return call

    return decorate


@_in_float32(reference.apply_penalties)
def apply_penalties(
    logits_RV: Tensor,
    output_counts_RV: Tensor,
    seen_RV: Tensor,
    *,
    presence_R: Tensor,
    frequency_R: Tensor,
    repetition_R: Tensor,
) -> Tensor:
    """One pass, rounding where the definition does."""
    out = torch.empty_like(logits_RV, memory_format=torch.contiguous_format)
    rows, vocab = logits_RV.shape
    if rows:
        block = min(triton.next_power_of_2(vocab), 1024)
        _penalise[(triton.cdiv(vocab, block), rows)](
            logits_RV.contiguous(),
            output_counts_RV.contiguous(),
            seen_RV.contiguous(),
            presence_R,
            frequency_R,
            repetition_R,
            out,
            vocab,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _penalise(
    logits, counts, seen, presence, frequency, repetition, out, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, inside = row * vocab + column, column < vocab
    logit = tl.load(logits + at, mask=inside, other=0.0)
    count = tl.load(counts + at, mask=inside, other=0)
    was_seen = tl.load(seen + at, mask=inside, other=0) != 0
    factor = tl.load(repetition + row).to(tl.float32)
    divided = tl.div_rn(logit, tl.broadcast_to(factor, logit.shape))
    repeated = tl.where(logit > 0, divided, logit * factor)
    logit = tl.where(was_seen, repeated, logit)
    logit -= tl.load(frequency + row).to(tl.float32) * count.to(tl.float32)
    logit -= tl.load(presence + row).to(tl.float32) * (count > 0).to(tl.float32)
    tl.store(out + at, logit, mask=inside)


@_in_float32(reference.greedy)
def greedy(logits_RV: Tensor) -> Tensor:
    """The best of every tile, then the best of these."""
    rows, vocab = logits_RV.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if rows:
        logits_RV = logits_RV.contiguous()
        tiles = triton.cdiv(vocab, _TILE)
        best = torch.empty(rows, tiles, dtype=torch.int64, device=logits_RV.device)
        _best_of_tile[(tiles, rows)](logits_RV, best, vocab, TILE=_TILE, num_warps=8)
        _best_of_row[(rows,)](best, out, tiles, TILES=triton.next_power_of_2(tiles), num_warps=1)
    return out


@triton.jit
def _best_of_tile(logits, best, vocab, TILE: tl.constexpr):
    """Key and id in one integer: the larger key wins, then the smaller id."""
    tile, row = tl.program_id(0), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(
        logits + row.to(tl.int64) * vocab + column, mask=column < vocab, other=float("-inf")
    )
    packed = (_key(logit).to(tl.int64) << 32) | (0x7FFFFFFF - column)
    tl.store(best + row * tl.num_programs(0) + tile, tl.max(packed, axis=0))


@triton.jit
def _best_of_row(best, out, tiles, TILES: tl.constexpr):
    row, tile = tl.program_id(0), tl.arange(0, TILES)
    packed = tl.load(best + row * tiles + tile, mask=tile < tiles, other=-(2**63))
    packed = tl.max(packed, axis=0)
    token = 0x7FFFFFFF - (packed & 0x7FFFFFFF)
    tl.store(out + row, tl.where(_is_finite((packed >> 32).to(tl.int32)), token, -1))


@_in_float32(reference.sample)
def sample(
    logits_RV: Tensor,
    *,
    temperature_R: Tensor,
    min_p_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    uniform_R: Tensor,
) -> Tensor:
    """One pass over the logits, then a program a row that works on what it left.

    The pass keeps each tile's best logit, its sum of weights and, of rows that min_p, top_k or
    top_p cut, its best logits. A row without a cut is drawn from the one tile that its uniform
    number falls into, a row with a cut from the listed logits; where these do not reach far enough
    (a flat distribution), from the whole row, slowly.
    """
    rows, vocab = logits_RV.shape
    device = logits_RV.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return out
    logits_RV = logits_RV.contiguous()
    tiles = triton.cdiv(vocab, _TILE)
    best = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    cut = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    mass = torch.empty(rows, tiles, dtype=torch.float64, device=device)
    least = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    keys = torch.empty(rows, tiles, _LISTED, dtype=torch.int32, device=device)
    ids = torch.empty(rows, tiles, _LISTED, dtype=torch.int32, device=device)
    parameters = (temperature_R, min_p_R, top_k_R, top_p_R)
    _summarise[(tiles, rows)](
        logits_RV,
        *parameters,
        *(best, least, cut, mass, keys, ids),
        vocab,
        TILE=_TILE,
        LISTED=_LISTED,
        num_warps=8,
    )
    _draw[(rows,)](
        logits_RV,
        *parameters,
        uniform_R,
        *(best, least, cut, mass, keys, ids),
        out,
        vocab,
        tiles,
        TILE=_TILE,
        LISTED=_LISTED,
        TILES=triton.next_power_of_2(tiles),
        num_warps=32,
    )
    return out


@triton.jit
def _key(x):
    """Float32 -> int32 in the same order; zeros are equal, NaN is above all."""
    positive_zero = x + 0.0
    bits = positive_zero.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The inverse of ``_key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _is_finite(key):
    """Of a number, by its key."""
    return (key < 0x7F800000) & (key > _NOTHING)


@triton.jit
def _weight(key, best, coldness):
    """``exp((x - best) coldness)`` float64 of the numbers behind keys, best being finite."""
    return _exp((_number(key).to(tl.float64) - _number(best).to(tl.float64)) * coldness)


@triton.jit
def _exp(x):
    """``exp`` of float64 at most 0, within about 1e-14; below 2^-1000 it is 0."""
    doublings = tl.maximum(x * 1.4426950408889634, -1001.0)
    # Added to 1.5 * 2^52, a number is rounded to an integer, which its last bits then hold.
    shifted = doublings + 6755399441055744.0
    part = doublings - (shifted - 6755399441055744.0)
    series = part * _EXP2_SERIES[11] + _EXP2_SERIES[10]
    for n in tl.static_range(9, -1, -1):
        series = series * part + _EXP2_SERIES[n]
    bits = series.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
    return tl.where(doublings > -1000.0, bits.to(tl.float64, bitcast=True), 0.0)


@triton.jit
def _summarise(
    logits,
    temperature,
    min_p,
    top_k,
    top_p,
    best,
    least,
    cut,
    mass,
    keys,
    ids,
    vocab,
    TILE: tl.constexpr,
    LISTED: tl.constexpr,
):
    """A tile: its best key, sum of weights, and all keys above a cut, in the order of ids."""
    tile, row = tl.program_id(0), tl.program_id(1)
    place = row * tl.num_programs(0) + tile
    column = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(
        logits + row.to(tl.int64) * vocab + column, mask=column < vocab, other=float("-inf")
    )
    key = _key(logit)
    top = tl.max(key, axis=0)
    tl.store(best + place, top)
    k = tl.load(top_k + row)
    if k <= 0:
        total = tl.full([], 0.0, tl.float64)
        if _is_finite(top):
            total = tl.sum(_weight(key, top, 1 / tl.load(temperature + row)), axis=0)
        tl.store(mass + place, total)
    if (k > 0) | (tl.load(top_p + row) < 1) | (tl.load(min_p + row) > 0):
        is_number = key > _NOTHING
        low = tl.min(tl.where(is_number, logit, float("inf")), axis=0)
        high = tl.max(tl.where(is_number, logit, float("-inf")), axis=0)
        tl.store(least + place, _key(low))
        listed = 0
        if tl.sum(is_number.to(tl.int32), axis=0) <= LISTED:
            high, listed = float("-inf"), LISTED
        # Halving the interval ends within some ten steps, unless many logits are equal.
        steps = 0
        while (steps < 24) & (listed < LISTED * 3 // 4):
            middle = 0.5 * low + 0.5 * high
            count = tl.sum((logit > middle).to(tl.int32), axis=0)
            fits = count <= LISTED
            low, high = tl.where(fits, low, middle), tl.where(fits, middle, high)
            listed = tl.where(fits, count, listed)
            steps += 1
        tl.store(cut + place, _key(high))
        chosen = (logit > high).to(tl.int32)
        slot = place.to(tl.int64) * LISTED
        at = slot + tl.cumsum(chosen, axis=0) - 1
        tl.store(keys + at, key, mask=chosen > 0)
        tl.store(ids + at, column, mask=chosen > 0)
        rest = tl.arange(0, LISTED)
        tl.store(keys + slot + rest, _NOTHING, mask=rest >= tl.sum(chosen, axis=0))


@triton.jit
def _draw(
    logits,
    temperature,
    min_p,
    top_k,
    top_p,
    uniform,
    best,
    least,
    cut,
    mass,
    keys,
    ids,
    out,
    vocab,
    tiles,
    TILE: tl.constexpr,
    LISTED: tl.constexpr,
    TILES: tl.constexpr,
):
    """A row: from a tile where nothing is cut, from the lists, or from all of it."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    tile = tl.arange(0, TILES)
    at, exists = row * tiles + tile, tile < tiles
    bests = tl.load(best + at, mask=exists, other=_NOTHING)
    top = tl.max(bests, axis=0)
    token = tl.full([], -1, tl.int64)
    if _is_finite(top):
        coldness, u = 1 / tl.load(temperature + row), tl.load(uniform + row)
        share, k, p = tl.load(min_p + row), tl.load(top_k + row), tl.load(top_p + row)
        masses = tl.zeros([TILES], tl.float64)
        if k <= 0:
            sums = tl.load(mass + at, mask=exists, other=0.0)
            masses = sums * _weight(bests, top, coldness)
        total = tl.sum(masses, axis=0)
        cuts = (k > 0) | (p < 1) | (share > 0)
        reaches = False
        if cuts:
            lowest = tl.max(tl.load(cut + at, mask=exists, other=_NOTHING), axis=0)
            slot = tl.arange(0, TILES * LISTED)
            listed = row * tiles * LISTED + slot
            key = tl.load(keys + listed, mask=slot < tiles * LISTED, other=_NOTHING)
            found = tl.sum((key > lowest).to(tl.int64), axis=0)
            weight = tl.where(key > lowest, _weight(key, top, coldness), 0.0)
            reaches = (lowest == _NOTHING) | ((k > 0) & (k <= found))
            reaches |= _weight(lowest, top, coldness) < share
            reaches |= (k <= 0) & (share <= 0) & (tl.sum(weight, axis=0) >= p * total)
            if reaches:
                drops = (key <= lowest) | (weight < share)
                key, weight = tl.where(drops, _NOTHING, key), tl.where(drops, 0.0, weight)
                bottom = tl.min(tl.where(drops, top, key), axis=0)
                source = (logits, vocab, key, weight, top, coldness, share)
                floor, ceiling, ties, kept = _cut(source, bottom, k, p, total, False, TILE)
                first = _pick(key, weight, u * kept, 0, floor, ceiling, ties)
                token = tl.load(ids + row * tiles * LISTED + first).to(tl.int64)
        if not reaches:
            floor, ceiling = (
                tl.full([], _NOTHING + 1, tl.int64),
                tl.full([], _NOTHING + 1, tl.int64),
            )
            ties, seen = tl.full([], 0, tl.int64), tl.zeros([TILES], tl.int64)
            if cuts:
                bottom = tl.min(tl.load(least + at, mask=exists, other=top), axis=0)
                source = (logits, vocab, bests, bests, top, coldness, share)
                floor, ceiling, ties, _ = _cut(source, bottom, k, p, total, True, TILE)
                masses, seen = _kept_of_tiles(
                    logits, vocab, top, coldness, share, floor, ceiling, ties, TILE, TILES
                )
            before = tl.cumsum(masses, axis=0) - masses
            target = u * tl.sum(masses, axis=0)
            chosen = tl.max(tl.where((masses > 0) & (before <= target), tile, 0), axis=0)
            is_chosen = tile == chosen
            key, weight = _block(logits, chosen * TILE, vocab, top, coldness, share, TILE)
            first = _pick(
                key,
                weight,
                target - tl.sum(tl.where(is_chosen, before, 0.0), axis=0),
                tl.sum(tl.where(is_chosen, seen, 0), axis=0),
                floor,
                ceiling,
                ties,
            )
            token = (chosen * TILE + first).to(tl.int64)
    tl.store(out + row, token)


@triton.jit
def _cut(source, bottom, k, p, total, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """What top_k, then top_p, leave: all keys from ``ceiling`` up, and of those from ``floor`` to
    it, which are equal, the first ``ties``.

    Args:
        source: see ``_sums``.
        bottom: the least key.
        k: of the row.
        p: of the row.
        total: mass of the row, which top_p takes its share of where nothing else is off.
        WHOLE: see ``_sums``.
        TILE: likewise.

    Returns:
        ``floor``, ``ceiling``, ``ties``, and the mass of all that is kept.
    """
    share = source[6]
    end = source[4].to(tl.int64) + 1
    floor = bottom.to(tl.int64)
    above, count = _sums(floor, source, WHOLE, TILE)
    ceiling, ties, tie = floor, tl.full([], 0, tl.int64), tl.full([], 0.0, tl.float64)
    if (k > 0) & (count > k):
        floor, ceiling, above, count, tie, equal = _narrow(
            k.to(tl.float64), True, floor, end, above, count, source, WHOLE, TILE
        )
        ties = k - count
    if p < 1:
        goal = p * tl.where((k <= 0) & (share <= 0), total, above + ties * tie)
        goal = tl.maximum(goal, 1e-300)  # the best stays, however small p is
        if goal > above:
            ties = _needed(goal - above, tie, ties)
        else:
            floor, ceiling, above, count, tie, equal = _narrow(
                goal, False, ceiling, end, above, count, source, WHOLE, TILE
            )
            ties = _needed(goal - above, tie, equal)
    return floor, ceiling, ties, above + ties * tie


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
    mass_high, count_high = tl.full([], 0.0, tl.float64), tl.full([], 0, tl.int64)
    while (high - low > 1) & (count_low - count_high > 1):
        middle = _key(0.5 * _number(low.to(tl.int32)) + 0.5 * _number(high.to(tl.int32)))
        middle = tl.minimum(tl.maximum(middle.to(tl.int64), low + 1), high - 1)
        mass, count = _sums(middle, source, WHOLE, TILE)
        if BY_COUNT:
            reaches = count.to(tl.float64) >= goal
        else:
            reaches = mass >= goal
        low, high = tl.where(reaches, middle, low), tl.where(reaches, high, middle)
        mass_low, mass_high = tl.where(reaches, mass, mass_low), tl.where(reaches, mass_high, mass)
        count_low = tl.where(reaches, count, count_low)
        count_high = tl.where(reaches, count_high, count)
    equal = count_low - count_high
    tie = (mass_low - mass_high) / tl.maximum(equal, 1).to(tl.float64)
    return low, high, mass_high, count_high, tie, equal


@triton.jit
def _needed(mass, weight, most):
    """How many of ``most`` equal weights reach a mass; one at least."""
    wanted = tl.ceil(mass / tl.maximum(weight, 1e-300))
    return tl.minimum(tl.maximum(wanted, 1.0), most.to(tl.float64)).to(tl.int64)


@triton.jit
def _sums(level, source, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """Mass and count of what lies at or above a key.

    In the lists, whose keys and weights are at hand; or in the whole row, which is read anew, with
    weights in float32: there a border of top_p is exact to 1e-6 of the mass.
    """
    logits, vocab, key, weight, top, coldness, share = source
    level = level.to(tl.int32)
    if WHOLE:
        start, mass = 0, tl.full([], 0.0, tl.float64)
        count = tl.full([], 0, tl.int64)
        scale = (1.4426950408889634 * coldness).to(tl.float32)
        best = _number(top)
        while start < vocab:
            column = start + tl.arange(0, TILE)
            logit = tl.load(logits + column, mask=column < vocab, other=float("-inf"))
            near = tl.exp2((logit - best) * scale)
            counts = (_key(logit) >= level) & (near >= share.to(tl.float32))
            mass += tl.sum(tl.where(counts, near, 0.0), axis=0).to(tl.float64)
            count += tl.sum(counts.to(tl.int32), axis=0)
            start += TILE
    else:
        mass = tl.sum(tl.where(key >= level, weight, 0.0), axis=0)
        count = tl.sum((key >= level).to(tl.int32), axis=0).to(tl.int64)
    return mass, count


@triton.jit
def _kept_of_tiles(
    logits,
    vocab,
    top,
    coldness,
    share,
    floor,
    ceiling,
    ties,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Mass that each tile keeps, and how many ties come before it."""
    tile = tl.arange(0, TILES)
    masses, before = tl.zeros([TILES], tl.float64), tl.zeros([TILES], tl.int64)
    index, seen = 0, tl.full([], 0, tl.int64)
    while index * TILE < vocab:
        key, weight = _block(logits, index * TILE, vocab, top, coldness, share, TILE)
        kept, num_ties = _kept(key, seen, floor, ceiling, ties)
        mass = tl.sum(tl.where(kept, weight, 0.0), axis=0)
        masses = tl.where(tile == index, mass, masses)
        before = tl.where(tile == index, seen, before)
        seen += num_ties
        index += 1
    return masses, before


@triton.jit
def _block(logits, start, vocab, top, coldness, share, TILE: tl.constexpr):
    """Keys and weights of a tile of a row; what min_p drops has the lowest key and no weight."""
    column = start + tl.arange(0, TILE)
    key = _key(tl.load(logits + column, mask=column < vocab, other=float("-inf")))
    weight = _weight(key, top, coldness)
    drops = weight < share
    return tl.where(drops, _NOTHING, key), tl.where(drops, 0.0, weight)


@triton.jit
def _kept(key, seen, floor, ceiling, ties):
    """``[n]`` bool: what ``_cut`` leaves, ``seen`` ties being in the parts before; their count."""
    is_tie = (key >= floor) & (key < ceiling)
    rank = seen + tl.cumsum(is_tie.to(tl.int32), axis=0)
    return (key >= ceiling) | (is_tie & (rank <= ties)), tl.sum(is_tie.to(tl.int32), axis=0)


@triton.jit
def _pick(key, weight, target, seen, floor, ceiling, ties):
    """The place at which the sum of kept weights, in the order of ids, exceeds a target."""
    place = tl.arange(0, key.shape[0])
    kept, _ = _kept(key, seen, floor, ceiling, ties)
    weight = tl.where(kept, weight, 0.0)
    sums = tl.cumsum(weight, axis=0)
    # Something must be added here: rounding may lift a sum where nothing is.
    first = tl.min(tl.where((weight > 0) & (sums > target), place, key.shape[0]), axis=0)
    last = tl.max(tl.where(weight > 0, place, 0), axis=0)
    return tl.minimum(first, last)
