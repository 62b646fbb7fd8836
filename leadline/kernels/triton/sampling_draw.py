"""The launches of ``sample``: what a row keeps, and which of it a uniform number falls on.

The cut of top_k and top_p is searched by all programs of a row together: each launch writes sums
tile by tile, and the next begins with what these say of the row.
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
    sums_of_tiles,
    weight_of,
    weights,
)
from leadline.kernels.triton.sampling_search import (
    FIRST,
    SECOND,
    bracket,
    first_levels,
    load_strips,
    load_sums,
    search,
    second_levels,
    sums_above,
)

_FIRST, _SECOND = tl.constexpr(FIRST), tl.constexpr(SECOND)


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
    """A tile: its best key and, where nothing cuts, its mass.

    Where something cuts, its least key and, for top_k and top_p, the sums above the first levels.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = row * tl.num_programs(0) + tile
    strips = load_strips(logits + row * vocab, tile * TILE, vocab, TILE, STRIP)
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
            levels = first_levels(number_of(top), warmth, coldness)
            sums = sums_above(strips, levels, number_of(top), coldness, k, TILE, STRIP)
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
    FEW: tl.constexpr,
    TILE: tl.constexpr,
    STRIP: tl.constexpr,
    TILES: tl.constexpr,
):
    """A tile: sums above the second levels, if more than FEW lie between two of the first.

    The first tile writes what all found of the row: ``[4]`` keys (the best, the least that min_p
    leaves, the borders of the cut) and ``[3]`` numbers (as ``search`` returns them).
    """
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
                low, high, size, least_goal, most_goal = search(
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
            if size > FEW:
                strips = load_strips(logits + row * vocab, tile * TILE, vocab, TILE, STRIP)
                levels = second_levels(low, tl.minimum(high, top))
                sums = sums_above(strips, levels, number_of(top), coldness, k, TILE, STRIP)
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
    FEW: tl.constexpr,
    LISTED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """A tile: the keys between the borders of the cut, in the order of ids, and how many they are.

    And the count and mass of what lies above, and the mass of all that min_p leaves. The first tile
    writes the borders. A row whose k is small is listed down to its cut, with nothing above.
    """
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
            if size > FEW:
                levels = second_levels(low, tl.minimum(high, top))
                sums = tl.sum(load_sums(second + row * tiles * _SECOND, tiles, TILES), axis=0)
                low, high, size = bracket(sums, levels, least_goal, most_goal, low, high)
            if (k > 0) & (size <= FEW):
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
