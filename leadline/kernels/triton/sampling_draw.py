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

FIRST, SECOND = 16, 32  # levels of the two searches
_FIRST, _SECOND = tl.constexpr(FIRST), tl.constexpr(SECOND)
_FEW = tl.constexpr(1024)  # entries of a row that are listed without looking closer


@triton.jit
def summarise(
    logits,
    temperature,
    min_p,
    top_k,
    top_p,
    best,
    least,
    first,
    mass,
    vocab,
    TILE: tl.constexpr,
    STRIP: tl.constexpr,
):
    """A tile: its best key and, of rows that nothing cuts, its sum of weights; of others its least
    key, and the count or rough mass of what lies at or above some levels."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = row * tl.num_programs(0) + tile
    strips = _load_strips(logits + row * vocab, tile * TILE, vocab, TILE, STRIP)
    k, p, share = _cuts(top_k + row, top_p + row, min_p + row, vocab)
    warmth = tl.load(temperature + row)
    coldness = 1 / warmth
    keys = tl.full([STRIP, 1], NOTHING, tl.int32)
    for index in tl.static_range(TILE // STRIP):
        keys = tl.maximum(keys, key_of(strips[index]))
    top = tl.max(keys)
    tl.store(best + place, top)
    if (k > 0) | (p < 1) | (share > 0):
        keys = tl.full([STRIP, 1], 0x7FFFFFFF, tl.int32)
        for index in tl.static_range(TILE // STRIP):
            key = key_of(strips[index])
            keys = tl.minimum(keys, tl.where(key > NOTHING, key, 0x7FFFFFFF))
        tl.store(least + place, tl.min(keys))
        if ((k > 0) | (p < 1)) & is_finite(top):
            levels = _first_levels(number_of(top), warmth, coldness)
            sums = _sums_above(strips, levels, number_of(top), coldness, k, TILE, STRIP)
            tl.store(first + place * _FIRST + tl.arange(0, _FIRST), sums)
    else:
        sums = tl.zeros([STRIP, 1], tl.float64)
        if is_finite(top):
            for index in tl.static_range(TILE // STRIP):
                sums += weights(strips[index], number_of(top), coldness)
        tl.store(mass + place, tl.sum(sums))


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
    found,
    goals,
    vocab,
    tiles,
    TILE: tl.constexpr,
    STRIP: tl.constexpr,
    TILES: tl.constexpr,
):
    """A tile of a row whose cut leaves many in question: sums above closer levels."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p, share = _cuts(top_k + row, top_p + row, min_p + row, vocab)
    if (k > 0) | (p < 1) | (share > 0):
        warmth = tl.load(temperature + row)
        coldness = 1 / warmth
        bests, leasts = _load_extremes(best + row * tiles, least + row * tiles, tiles, TILES)
        top = tl.max(bests, axis=0)
        found += row * 4
        goals += row * 3
        if tile == 0:
            tl.store(found, top)
        if is_finite(top):
            bottom = _at_least(share, tl.min(leasts, axis=0), top, warmth)
            low, high, size, least_goal, most_goal = bottom, bottom, 0.0, 0.0, 0.0
            if (k > 0) | (p < 1):
                low, high, size, least_goal, most_goal = _search(
                    first + row * tiles * _FIRST,
                    bests,
                    top,
                    bottom,
                    warmth,
                    coldness,
                    k,
                    p,
                    share,
                    TILES,
                )
            if size > _FEW:
                strips = _load_strips(logits + row * vocab, tile * TILE, vocab, TILE, STRIP)
                levels = _second_levels(low, tl.minimum(high, top))
                sums = _sums_above(strips, levels, number_of(top), coldness, k, TILE, STRIP)
                level = tl.arange(0, _SECOND)
                tl.store(second + (row * tiles + tile) * _SECOND + level, sums)
            if tile == 0:
                tl.store(found + 1, bottom)
                tl.store(found + 2, low)
                tl.store(found + 3, high)
                tl.store(goals, size)
                tl.store(goals + 1, least_goal)
                tl.store(goals + 2, most_goal)


@triton.jit
def list_borders(
    logits,
    temperature,
    min_p,
    top_k,
    top_p,
    second,
    found,
    goals,
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
        warmth = tl.load(temperature + row)
        coldness = 1 / warmth
        found += row * 4
        goals += row * 3
        top, bottom = tl.load(found), tl.load(found + 1)
        low, high = tl.load(found + 2), tl.load(found + 3)
        size, least_goal, most_goal = tl.load(goals), tl.load(goals + 1), tl.load(goals + 2)
        if is_finite(top):
            if size > _FEW:
                levels = _second_levels(low, tl.minimum(high, top))
                sums = tl.sum(_load_sums(second + row * tiles * _SECOND, tiles, TILES), axis=0)
                low, high, size = _bracket(sums, levels, least_goal, most_goal, low, high)
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
    FEW_LISTED: tl.constexpr,
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
    warmth, u = tl.load(temperature + row), tl.load(uniform + row)
    coldness = 1 / warmth
    bests = tl.load(best + at, mask=exists, other=NOTHING)
    sums = tl.load(mass + at, mask=exists & ~is_cut, other=0.0)
    exists &= is_cut
    above = tl.load(masses + at * 2, mask=exists, other=0.0)
    totals = tl.load(masses + at * 2 + 1, mask=exists, other=0.0)
    counts_above = tl.load(counts + at * 2, mask=exists, other=0)
    listed = tl.load(counts + at * 2 + 1, mask=exists, other=0)
    few = _load_listed(keys, at, exists, FEW_LISTED, LISTED)
    low, high = tl.load(borders + row * 2), tl.load(borders + row * 2 + 1)
    top = tl.max(bests, axis=0)
    token = tl.full([], -1, tl.int64)
    if is_finite(top):
        floor = tl.full([], NOTHING + 1, tl.int64)
        ceiling, ties = floor, tl.full([], 0, tl.int64)
        before_ties = tl.zeros([TILES], tl.int64)
        if is_cut:
            total = tl.sum(totals, axis=0)
            most_listed = tl.max(listed, axis=0)
            fits = (most_listed <= LISTED) & ((k <= 0) | (p >= 1) | (high > top))
            if fits & (most_listed <= FEW_LISTED):
                floor, ceiling, ties, sums, before_ties = _cut_list(
                    few, above, counts_above, total, top, coldness, low, high, k, p
                )
            elif fits:
                many = _load_listed(keys, at, exists, LISTED, LISTED)
                floor, ceiling, ties, sums, before_ties = _cut_list(
                    many, above, counts_above, total, top, coldness, low, high, k, p
                )
            else:
                low = tl.min(tl.load(least + at, mask=exists, other=0x7FFFFFFF), axis=0)
                low = _at_least(share, low, top, warmth)
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
        keys_of_tile, weights_of_tile = load_tile(logits, chosen * TILE, vocab, top, coldness, TILE)
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
def _load_listed(keys, tiles, exists, COUNT: tl.constexpr, LISTED: tl.constexpr):
    """``[TILES, COUNT]`` of what is listed of some tiles."""
    at = tiles[:, None] * LISTED + tl.arange(0, COUNT)[None, :]
    return tl.load(keys + at, mask=exists[:, None], other=NOTHING)


@triton.jit
def _cut_list(listed, above, counts_above, total, top, coldness, low, high, k, p):
    """What a row keeps by its list.

    Returns:
        As ``cut_keys``; for each tile the mass that is kept, and how many ties come before it.
    """
    TILES: tl.constexpr = listed.shape[0]
    COUNT: tl.constexpr = listed.shape[1]
    key = listed.reshape(TILES * COUNT)
    weight = weight_of(key, top, coldness)
    mass, count = tl.sum(above, axis=0), tl.sum(counts_above, axis=0).to(tl.int64)
    source = (None, None, top, coldness, key, weight, mass, count)
    floor, ceiling, ties = cut_keys(source, low, high, k, p, total, False, None)
    kept, _ = kept_of(key, 0, floor, ceiling, ties)
    sums = above + tl.sum(tl.where(kept, weight, 0.0).reshape(TILES, COUNT), axis=1)
    is_tie = (key >= floor) & (key < ceiling)
    num_ties = tl.sum(is_tie.to(tl.int64).reshape(TILES, COUNT), axis=1)
    return floor, ceiling, ties, sums, tl.cumsum(num_ties, axis=0) - num_ties


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
def _at_least(share, low, top, warmth):
    """The least key that min_p leaves."""
    if share > 0:
        low = tl.maximum(low, tl.minimum(key_of_share(share, top, warmth), top))
    return low


@triton.jit
def _first_levels(best, warmth, coldness):
    """Keys that weights a factor e apart have, down from the best, on a grid that all tiles share;
    the last is the least of all."""
    level = tl.arange(0, _FIRST)
    key = key_of((_place_on_grid(best, coldness) - level) * warmth.to(tl.float32))
    return tl.where(level < _FIRST - 1, key, NOTHING + 1)


@triton.jit
def _place_on_grid(x, coldness):
    """Which multiple of the temperature a number exceeds."""
    return tl.floor(x * coldness.to(tl.float32))


@triton.jit
def _second_levels(low, high):
    """Evenly from a key to another."""
    part = tl.arange(0, _SECOND).to(tl.float32) / _SECOND
    key = key_of(number_of(low) * (1 - part) + number_of(high) * part)
    return tl.where(part > 0, tl.maximum(key, low), low)


@triton.jit
def _sums_above(strips, levels, best, coldness, k, TILE: tl.constexpr, STRIP: tl.constexpr):
    """How many of a tile lie at or above each level or, if no k is given, their rough mass."""
    above = tl.zeros([STRIP, levels.shape[0]], tl.float32)
    for index in tl.static_range(TILE // STRIP):
        rough = tl.where(k > 0, 1.0, rough_weights(strips[index], best, coldness))
        above += tl.where(key_of(strips[index]) >= levels[None, :], rough, 0.0)
    return tl.sum(above, axis=0)


@triton.jit
def _search(first, bests, top, bottom, warmth, coldness, k, p, share, TILES: tl.constexpr):
    """Where a row's cut lies by the first levels.

    Returns:
        As ``_bracket``, and the least and the most that the sum at the cut may be.
    """
    tile, level = tl.arange(0, TILES)[:, None], tl.arange(0, _FIRST)[None, :]
    best, numbers = number_of(top), number_of(bests)
    place = _place_on_grid(best, coldness)
    apart = (place - _place_on_grid(numbers, coldness))[:, None]
    own = tl.where(level < _FIRST - 1, level - apart, _FIRST - 1.0)
    there = is_finite(bests)[:, None] & (own >= 0)
    own = tl.where(there, own, 0.0).to(tl.int32)
    sums = tl.load(first + tile * _FIRST + own, mask=there, other=0.0)
    scale = tl.where(k > 0, 1.0, rough_weights(numbers, best, coldness))
    sums = tl.sum(sums * scale[:, None], axis=0)
    levels = _first_levels(best, warmth, coldness)
    total = tl.max(sums, axis=0)
    # Multiples of the temperature are not told apart if they are too large.
    is_told = tl.abs(place) < 1e6
    levels, sums = tl.where(is_told, levels, NOTHING + 1), tl.where(is_told, sums, total)
    if k > 0:
        least, most = k.to(tl.float32), k.to(tl.float32)
    else:
        least, most = total, total
        if share > 0:
            least = tl.max(tl.where(levels >= bottom, sums, 0.0), axis=0)
            most = tl.min(tl.where(levels <= bottom, sums, total), axis=0)
        # Sums are rough.
        least, most = p.to(tl.float32) * least * (1 - 1e-5), p.to(tl.float32) * most * (1 + 1e-5)
    low, high, size = _bracket(sums, levels, least, most, bottom, top + 1)
    if k <= 0:
        size -= tl.max(tl.where(sums < least, sums, 0.0), axis=0)
        size /= tl.maximum(rough_weights(number_of(low), best, coldness), 1e-30)
    return low, high, size, least, most


@triton.jit
def _load_strips(logits, start, vocab, TILE: tl.constexpr, STRIP: tl.constexpr):
    """The logits of a tile, in parts ``[STRIP, 1]``: beside levels ``[1, n]``, a thread sums what it
    has loaded."""
    strips = ()
    for index in tl.static_range(TILE // STRIP):
        column = start + index * STRIP + tl.arange(0, STRIP)[:, None]
        strips += (tl.load(logits + column, mask=column < vocab, other=float("-inf")),)
    return strips


@triton.jit
def _load_sums(partial, tiles, TILES: tl.constexpr):
    """``[TILES, SECOND]`` of a row."""
    tile, level = tl.arange(0, TILES)[:, None], tl.arange(0, _SECOND)[None, :]
    return tl.load(partial + tile * _SECOND + level, mask=tile < tiles, other=0.0)


@triton.jit
def _bracket(sums, levels, least, most, low, high):
    """Between which levels a row's cut lies: where the sums first reach what they are to be.

    Returns:
        A key at or below the cut, one above it, and the sum down to the first.
    """
    reaches, misses = sums >= most, sums < least
    size = tl.min(tl.where(reaches, sums, tl.max(sums, axis=0)), axis=0)
    low = tl.maximum(tl.max(tl.where(reaches, levels, low), axis=0), low)
    high = tl.min(tl.where(misses, levels, high), axis=0)
    return low, tl.maximum(high, low), size
