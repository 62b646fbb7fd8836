"""The launches of ``sample``: what a row keeps, and which of it a uniform number falls on.

The borders of top_k and top_p are searched by all programs of a row together: each launch sums
above some levels, tile by tile, and the next begins with what these sums say of the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leadline.kernels.triton.sampling_cuts import (
    NOTHING,
    cut_keys,
    is_finite,
    kept_of,
    key_of,
    key_of_share,
    load_tile,
    number_of,
    pick,
    rough_weights,
    sums_of_tiles,
    weight_of,
    weights,
)

LEVELS = 16
_LEVELS = tl.constexpr(LEVELS)
_FEW = tl.constexpr(1024)  # entries of a row that are listed without looking closer


@triton.jit
def summarise(
    logits, temperature, min_p, top_k, top_p, best, least, mass, vocab, TILE: tl.constexpr
):
    """A tile: its best key and its least, or of rows that nothing cuts its sum of weights."""
    tile, row = tl.program_id(0), tl.program_id(1)
    place = row * tl.num_programs(0) + tile
    column = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(
        logits + row.to(tl.int64) * vocab + column, mask=column < vocab, other=float("-inf")
    )
    key = key_of(logit)
    top = tl.max(key, axis=0)
    tl.store(best + place, top)
    k, p, share = _cuts(top_k + row, top_p + row, min_p + row, vocab)
    if (k > 0) | (p < 1) | (share > 0):
        tl.store(least + place, tl.min(tl.where(key > NOTHING, key, 0x7FFFFFFF), axis=0))
    else:
        total = tl.full([], 0.0, tl.float64)
        if is_finite(top):
            total = tl.sum(weights(logit, number_of(top), 1 / tl.load(temperature + row)), axis=0)
        tl.store(mass + place, total)


@triton.jit
def probe(
    logits,
    temperature,
    min_p,
    top_k,
    top_p,
    best,
    least,
    first,
    second,
    vocab,
    tiles,
    ROUND: tl.constexpr,
    TILE: tl.constexpr,
    STRIP: tl.constexpr,
    TILES: tl.constexpr,
):
    """A tile: the count or rough mass of what lies at or above each of some levels."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p, share = _cuts(top_k + row, top_p + row, min_p + row, vocab)
    if (k > 0) | (p < 1):
        # Whatever is read is under way before anything waits for it.
        start = logits + row * vocab
        if ROUND == 0:
            strips = _load_strips(start, tile * TILE, vocab, TILE, STRIP)
        coldness = 1 / tl.load(temperature + row)
        bests, leasts = _load_extremes(best + row * tiles, least + row * tiles, tiles, TILES)
        if ROUND == 1:
            partial = _load_sums(first + row * tiles * _LEVELS, tiles, TILES)
        top, low = tl.max(bests, axis=0), tl.min(leasts, axis=0)
        if is_finite(top):
            low = _at_least(share, low, top, coldness)
            levels = _first_levels(low, top, coldness)
            is_few = False
            if ROUND == 1:
                sums = tl.sum(partial, axis=0)
                goal = _goal(sums, k, p)
                low, high, size = _bracket(sums, levels, goal, low, top + 1, k, top, coldness)
                levels = _second_levels(low, tl.minimum(high, top))
                is_few = size <= _FEW
            if not is_few:
                if ROUND == 1:
                    strips = _load_strips(start, tile * TILE, vocab, TILE, STRIP)
                above = tl.zeros([STRIP, _LEVELS], tl.float32)
                for index in tl.static_range(TILE // STRIP):
                    logit = strips[index]
                    rough = rough_weights(logit, number_of(top), coldness)
                    rough = tl.where(k > 0, 1.0, rough)[:, None]
                    above += tl.where(key_of(logit)[:, None] >= levels[None, :], rough, 0.0)
                sums = tl.sum(above, axis=0)
                level = (row * tiles + tile) * _LEVELS + tl.arange(0, _LEVELS)
                tl.store((second if ROUND else first) + level, sums)


@triton.jit
def list_borders(
    logits,
    temperature,
    min_p,
    top_k,
    top_p,
    best,
    least,
    first,
    second,
    borders,
    keys,
    counts,
    masses,
    vocab,
    tiles,
    LISTED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """A tile: the keys between the borders, in the order of ids, and the mass of what is above."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p, share = _cuts(top_k + row, top_p + row, min_p + row, vocab)
    if (k > 0) | (p < 1) | (share > 0):
        column = tile * TILE + tl.arange(0, TILE)
        logit = tl.load(logits + row * vocab + column, mask=column < vocab, other=float("-inf"))
        coldness = 1 / tl.load(temperature + row)
        bests, leasts = _load_extremes(best + row * tiles, least + row * tiles, tiles, TILES)
        partial = _load_sums(first + row * tiles * _LEVELS, tiles, TILES)
        closer = _load_sums(second + row * tiles * _LEVELS, tiles, TILES)
        top, low = tl.max(bests, axis=0), tl.min(leasts, axis=0)
        if is_finite(top):
            bottom = _at_least(share, low, top, coldness)
            low, high = bottom, bottom
            if (k > 0) | (p < 1):
                levels = _first_levels(low, top, coldness)
                sums = tl.sum(partial, axis=0)
                goal = _goal(sums, k, p)
                low, high, size = _bracket(sums, levels, goal, low, top + 1, k, top, coldness)
                if size > _FEW:
                    levels = _second_levels(low, tl.minimum(high, top))
                    sums = tl.sum(closer, axis=0)
                    low, high, size = _bracket(sums, levels, goal, low, high, k, top, coldness)
                if (k > 0) & (size <= _FEW):
                    high = top + 1
            if tile == 0:
                tl.store(borders + row * 2, low)
                tl.store(borders + row * 2 + 1, high)
            key = key_of(logit)
            place = row * tiles + tile
            is_above = key >= high
            above, total = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
            if (k <= 0) | (high <= top):
                weight = weights(logit, number_of(top), coldness)
                above = tl.sum(tl.where(is_above, weight, 0.0), axis=0)
                total = tl.sum(tl.where(key >= bottom, weight, 0.0), axis=0)
            tl.store(masses + place * 2, above)
            tl.store(masses + place * 2 + 1, total)
            is_listed = ((key >= low) & (key < high)).to(tl.int32)
            listed = tl.sum(is_listed, axis=0)
            tl.store(counts + place * 2, tl.sum(is_above.to(tl.int32), axis=0))
            tl.store(counts + place * 2 + 1, listed)
            slots = keys + place * LISTED
            if listed > 0:
                slot = tl.cumsum(is_listed, axis=0) - 1
                tl.store(slots + slot, key, mask=(is_listed > 0) & (slot < LISTED))
            slot = tl.arange(0, LISTED)
            tl.store(slots + slot, NOTHING, mask=slot >= listed)


@triton.jit
def draw(
    logits,
    temperature,
    min_p,
    top_k,
    top_p,
    uniform,
    best,
    least,
    mass,
    borders,
    keys,
    counts,
    masses,
    out,
    vocab,
    tiles,
    LISTED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """A row: the tile that its uniform number falls into, and there the token."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    tile = tl.arange(0, TILES)
    at, exists = row * tiles + tile, tile < tiles
    k, p, share = _cuts(top_k + row, top_p + row, min_p + row, vocab)
    is_cut = (k > 0) | (p < 1) | (share > 0)
    # Whatever is read is under way before anything waits for it.
    coldness, u = 1 / tl.load(temperature + row), tl.load(uniform + row)
    bests = tl.load(best + at, mask=exists, other=NOTHING)
    sums = tl.load(mass + at, mask=exists & ~is_cut, other=0.0)
    exists &= is_cut
    above = tl.load(masses + at * 2, mask=exists, other=0.0)
    totals = tl.load(masses + at * 2 + 1, mask=exists, other=0.0)
    counts_above = tl.load(counts + at * 2, mask=exists, other=0)
    listed = tl.load(counts + at * 2 + 1, mask=exists, other=0)
    slot = tl.arange(0, TILES * LISTED)
    keys += row * tiles * LISTED + slot
    key = tl.load(keys, mask=(slot < tiles * LISTED) & is_cut, other=NOTHING)
    low, high = tl.load(borders + row * 2), tl.load(borders + row * 2 + 1)
    top = tl.max(bests, axis=0)
    token = tl.full([], -1, tl.int64)
    if is_finite(top):
        floor = tl.full([], NOTHING + 1, tl.int64)
        ceiling, ties = floor, tl.full([], 0, tl.int64)
        before_ties = tl.zeros([TILES], tl.int64)
        if is_cut:
            total = tl.sum(totals, axis=0)
            fits = tl.max(listed, axis=0) <= LISTED
            if fits & ((k <= 0) | (p >= 1) | (high > top)):
                count = tl.sum(counts_above, axis=0).to(tl.int64)
                weight = weight_of(key, top, coldness)
                source = (logits, vocab, top, coldness, key, weight, tl.sum(above, axis=0), count)
                floor, ceiling, ties = cut_keys(source, low, high, k, p, total, False, TILE)
                kept, _ = kept_of(key, 0, floor, ceiling, ties)
                weight = tl.where(kept, weight, 0.0)
                sums = above + tl.sum(weight.reshape(TILES, LISTED), axis=1)
                is_tie = (key >= floor) & (key < ceiling)
                num_ties = tl.sum(is_tie.to(tl.int64).reshape(TILES, LISTED), axis=1)
                before_ties = tl.cumsum(num_ties, axis=0) - num_ties
            else:
                low = tl.min(tl.load(least + at, mask=exists, other=0x7FFFFFFF), axis=0)
                low = _at_least(share, low, top, coldness)
                none, nothing = tl.full([], 0, tl.int64), tl.full([], 0.0, tl.float64)
                whole = (logits, vocab, top, coldness, bests, bests, nothing, none)
                floor, ceiling, ties = cut_keys(whole, low, top + 1, k, p, total, True, TILE)
                sums, before_ties = sums_of_tiles(whole, floor, ceiling, ties, TILE, TILES)
        else:
            sums *= weight_of(bests, top, coldness)
        before = tl.cumsum(sums, axis=0) - sums
        target = u * tl.sum(sums, axis=0)
        chosen = tl.max(tl.where((sums > 0) & (before <= target), tile, 0), axis=0)
        is_chosen = tile == chosen
        keys_of_tile, weights_of_tile = load_tile(
            logits, chosen * TILE, vocab, top, coldness, TILE
        )
        first = pick(
            keys_of_tile,
            weights_of_tile,
            target - tl.sum(tl.where(is_chosen, before, 0.0), axis=0),
            tl.sum(tl.where(is_chosen, before_ties, 0), axis=0),
            floor,
            ceiling,
            ties,
        )
        token = (chosen * TILE + first).to(tl.int64)
    tl.store(out + row, token)


@triton.jit
def _cuts(top_k, top_p, min_p, vocab):
    """A row's parameters; a k of all or more cuts nothing."""
    k = tl.load(top_k)
    return tl.where(k < vocab, k, 0), tl.load(top_p), tl.load(min_p)


@triton.jit
def _load_extremes(best, least, tiles, TILES: tl.constexpr):
    """The best and the least key of each tile of a row."""
    tile = tl.arange(0, TILES)
    bests = tl.load(best + tile, mask=tile < tiles, other=NOTHING)
    return bests, tl.load(least + tile, mask=tile < tiles, other=0x7FFFFFFF)


@triton.jit
def _at_least(share, low, top, coldness):
    """The least key that min_p leaves."""
    if share > 0:
        low = tl.maximum(low, tl.minimum(key_of_share(share, top, coldness), top))
    return low


@triton.jit
def _first_levels(low, top, coldness):
    """The least key, and up to the best numbers whose weights are a factor e apart, or less."""
    level = tl.arange(0, _LEVELS)
    best = number_of(top)
    step = tl.minimum((best - number_of(low)) / _LEVELS, (1 / coldness).to(tl.float32))
    key = key_of(best - (_LEVELS - level) * step)
    return tl.where(level > 0, tl.maximum(key, low), low)


@triton.jit
def _second_levels(low, high):
    """Evenly from a key to another."""
    part = tl.arange(0, _LEVELS).to(tl.float32) / _LEVELS
    key = key_of(number_of(low) * (1 - part) + number_of(high) * part)
    return tl.where(part > 0, tl.maximum(key, low), low)


@triton.jit
def _goal(sums, k, p):
    """The count, or the rough mass, that a row keeps."""
    return tl.where(k > 0, k.to(tl.float32), p.to(tl.float32) * tl.max(sums, axis=0))


@triton.jit
def _load_strips(logits, start, vocab, TILE: tl.constexpr, STRIP: tl.constexpr):
    """The logits of a tile in turn."""
    strips = ()
    for index in tl.static_range(TILE // STRIP):
        column = start + index * STRIP + tl.arange(0, STRIP)
        strips += (tl.load(logits + column, mask=column < vocab, other=float("-inf")),)
    return strips


@triton.jit
def _load_sums(partial, tiles, TILES: tl.constexpr):
    """``[TILES, LEVELS]`` of a row."""
    tile, level = tl.arange(0, TILES)[:, None], tl.arange(0, _LEVELS)[None, :]
    return tl.load(partial + tile * _LEVELS + level, mask=tile < tiles, other=0.0)


@triton.jit
def _bracket(sums, levels, goal, low, high, k, top, coldness):
    """Between which levels a row's cut lies: where the sums first reach a goal.

    Returns:
        A key at or below the cut and one above it, and how many entries there are at most from one
        to the other or, of rows with a k, from the first up.
    """
    slack = tl.where(k > 0, 0.0, 1e-5 * goal)  # of rough sums
    reaches, misses = sums >= goal + slack, sums < goal - slack
    low = tl.max(tl.where(reaches, levels, low), axis=0)
    high = tl.min(tl.where(misses, levels, high), axis=0)
    size = tl.min(tl.where(reaches, sums, tl.max(sums, axis=0)), axis=0)
    if k <= 0:
        size -= tl.max(tl.where(misses, sums, 0.0), axis=0)
        size /= tl.maximum(rough_weights(number_of(low), number_of(top), coldness), 1e-30)
    return low, high, size
