"""Between which logits of a row top_k and top_p cut, by sums that all its programs share.

Each program sums above some levels of its tile. Counts are exact. Masses are rough, within 1e-5, so
that what they say leaves room for that; what is kept in the end is decided by exact ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leadline.kernels.triton.sampling_cuts import (
    NOTHING,
    is_finite,
    key_of,
    number_of,
    rough_weights,
)

FIRST, SECOND = 16, 32
"""How many levels there are in the first search, and in the second, between two of the first."""

_FIRST, _SECOND = tl.constexpr(FIRST), tl.constexpr(SECOND)


@triton.jit
def load_strips(logits, start, vocab, TILE: tl.constexpr, STRIP: tl.constexpr):
    """The logits of a tile, in parts ``[STRIP, 1]``.

    Beside levels ``[1, n]``, each thread then sums what it has loaded, and nothing is exchanged.
    """
    strips = ()
    for index in tl.static_range(TILE // STRIP):
        column = start + index * STRIP + tl.arange(0, STRIP)[:, None]
        strip = tl.load(logits + column, mask=column < vocab, other=float("-inf"))
        strips += (strip,)  # type: ignore[assignment]  # Triton takes no annotation of its length
    return strips


@triton.jit
def first_levels(best, warmth, coldness):
    """``[FIRST]`` keys at which weights differ by a factor e, down from the best; all is the last.

    They are multiples of the temperature, so that sums of tiles with other bests can be added.
    """
    level = tl.arange(0, _FIRST)
    key = key_of((_place_on_grid(best, coldness) - level) * warmth.to(tl.float32))
    return tl.where(level < _FIRST - 1, key, NOTHING + 1)


@triton.jit
def _place_on_grid(x, coldness):
    """Which multiple of the temperature a number exceeds."""
    return tl.floor(x * coldness.to(tl.float32))


@triton.jit
def second_levels(low, high):
    """``[SECOND]`` keys, evenly from one to another."""
    part = tl.arange(0, _SECOND).to(tl.float32) / _SECOND
    key = key_of(number_of(low) * (1 - part) + number_of(high) * part)
    return tl.where(part > 0, tl.maximum(key, low), low)


@triton.jit
def sums_above(strips, levels, best, coldness, k, TILE: tl.constexpr, STRIP: tl.constexpr):
    """How many of a tile lie at or above each level or, if no k is given, their rough mass."""
    above = tl.zeros([STRIP, levels.shape[0]], tl.float32)
    for index in tl.static_range(TILE // STRIP):
        rough = tl.where(k > 0, 1.0, rough_weights(strips[index], best, coldness))
        above += tl.where(key_of(strips[index]) >= levels[None, :], rough, 0.0)
    return tl.sum(above, axis=0)


@triton.jit
def search(first, bests, top, bottom, warmth, coldness, k, p, share, TILES: tl.constexpr):
    """Where a row's cut lies by the first levels, from the sums of its tiles.

    Args:
        first: ``[tiles, FIRST]`` of the row, in tiles from their own bests down.
        bests: ``[TILES]`` keys of the tiles.
        top: the key of the row's best.
        bottom: the least key that min_p leaves.
        warmth: temperature of the row.
        coldness: its inverse.
        k: of the row.
        p: of the row.
        share: min_p of the row.
        TILES: a power of two.

    Returns:
        As ``bracket``, and the least and the most that the sum at the cut may be.
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
    levels = first_levels(best, warmth, coldness)
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
    low, high, size = bracket(sums, levels, least, most, bottom, top + 1)
    if k <= 0:
        size -= tl.max(tl.where(sums < least, sums, 0.0), axis=0)
        size /= tl.maximum(rough_weights(number_of(low), best, coldness), 1e-30)
    return low, high, size, least, most


@triton.jit
def load_sums(partial, tiles, TILES: tl.constexpr):
    """``[TILES, SECOND]`` of a row."""
    tile, level = tl.arange(0, TILES)[:, None], tl.arange(0, _SECOND)[None, :]
    return tl.load(partial + tile * _SECOND + level, mask=tile < tiles, other=0.0)


@triton.jit
def bracket(sums, levels, least, most, low, high):
    """Between which levels a row's cut lies: where the sums first reach what they are to be.

    Returns:
        A key at or below the cut, one above it, and the sum down to the first.
    """
    reaches, misses = (sums > 0) & (sums >= most), sums < least
    size = tl.min(tl.where(reaches, sums, tl.max(sums, axis=0)), axis=0)
    low = tl.maximum(tl.max(tl.where(reaches, levels, low), axis=0), low)
    high = tl.min(tl.where(misses, levels, high), axis=0)
    return low, tl.maximum(high, low), size
