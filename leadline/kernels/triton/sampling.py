"""Sampling: logits to token ids in two launches, and what changes logits before (kernels.md 14).

Rows are cut into tiles of a fixed size, so that a row's result does not depend on how many rows
there are. Weights are ``exp((logit - best) / temperature)`` in float64, exact to about 1e-14: a
token differs from the definition's where its uniform number, or a border of min_p or top_p, lies
that close to a sum of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.reference import sampling as reference
from leadline.kernels.triton.sampling_cuts import (
    NOTHING,
    column_of,
    cut_keys,
    first_key_of_weight,
    is_finite,
    key_of,
    load_tile,
    pick,
    ranked,
    sums_of_tiles,
    weight_of,
)

R = TypeVar("R")

_TILE = 4096
_LISTED = 256  # the best of a tile that are listed; all but flat distributions need no more


def _in_float32(definition: Callable[..., R]) -> Callable[..., Callable[..., R]]:
    """Logits of another dtype take the definition."""

    def decorate(fast: Callable[..., R]) -> Callable[..., R]:
        @wraps(fast)
        def call(logits_RV: Tensor, *args: Any, **kwargs: Any) -> R:
            run = fast if logits_RV.dtype == torch.float32 else definition
            return run(logits_RV, *args, **kwargs)

        return call

    return decorate


@_in_float32(reference.apply_bitmask)
def apply_bitmask(logits_RV: Tensor, row_N: Tensor, words_NW: Tensor) -> None:
    """One launch, which reads no logits."""
    masks, words = words_NW.shape
    if masks:
        vocab = logits_RV.shape[1]
        _forbid[(triton.cdiv(vocab, 1024), masks)](
            *(logits_RV, row_N, words_NW, vocab, words), BLOCK=1024, num_warps=4
        )


@triton.jit
def _forbid(logits, rows, masks, vocab, words, BLOCK: tl.constexpr):
    index = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    word = tl.load(masks + index.to(tl.int64) * words + column // 32, mask=inside, other=0)
    is_forbidden = ((word >> (column % 32)) & 1) == 0
    nothing = tl.full(column.shape, float("-inf"), tl.float32)
    at = tl.load(rows + index) * vocab + column
    tl.store(logits + at, nothing, mask=inside & is_forbidden)


@_in_float32(reference.apply_penalties)
def apply_penalties(
    logits_RV: Tensor,
    row_N: Tensor,
    id_N: Tensor,
    count_N: Tensor,
    *,
    presence_R: Tensor,
    frequency_R: Tensor,
    repetition_R: Tensor,
) -> None:
    """One launch, rounding where the definition does."""
    said = len(row_N)
    if said:
        _penalise[(triton.cdiv(said, 512),)](
            *(logits_RV, row_N, id_N, count_N, presence_R, frequency_R, repetition_R),
            *(logits_RV.shape[1], said),
            BLOCK=512,
            num_warps=4,
            enable_fp_fusion=False,
        )


@triton.jit
def _penalise(
    logits, rows, ids, counts, presence, frequency, repetition, vocab, said, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < said
    row = tl.load(rows + at, mask=inside, other=0)
    count = tl.load(counts + at, mask=inside, other=0)
    place = logits + row * vocab + tl.load(ids + at, mask=inside, other=0)
    logit = tl.load(place, mask=inside, other=0.0)
    factor = tl.load(repetition + row, mask=inside, other=1.0).to(tl.float32)
    logit = tl.where(logit > 0, tl.div_rn(logit, factor), logit * factor)
    logit -= tl.load(frequency + row, mask=inside, other=0.0).to(tl.float32) * count.to(tl.float32)
    each = tl.load(presence + row, mask=inside, other=0.0).to(tl.float32)
    logit -= each * (count > 0).to(tl.float32)
    tl.store(place, logit, mask=inside)


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
    tile, row = tl.program_id(0), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(
        logits + row.to(tl.int64) * vocab + column, mask=column < vocab, other=float("-inf")
    )
    packed = tl.max(ranked(key_of(logit), column), axis=0)
    tl.store(best + row * tl.num_programs(0) + tile, packed)


@triton.jit
def _best_of_row(best, out, tiles, TILES: tl.constexpr):
    row, tile = tl.program_id(0), tl.arange(0, TILES)
    packed = tl.load(best + row * tiles + tile, mask=tile < tiles, other=-(2**63))
    packed = tl.max(packed, axis=0)
    valid = is_finite((packed >> 32).to(tl.int32))
    tl.store(out + row, tl.where(valid, column_of(packed), -1))


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
        num_warps=16,
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
        num_warps=16,
    )
    return out


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
    key = key_of(logit)
    top = tl.max(key, axis=0)
    tl.store(best + place, top)
    k = tl.load(top_k + row)
    if k <= 0:
        total = tl.full([], 0.0, tl.float64)
        if is_finite(top):
            total = tl.sum(weight_of(key, top, 1 / tl.load(temperature + row)), axis=0)
        tl.store(mass + place, total)
    if (k > 0) | (tl.load(top_p + row) < 1) | (tl.load(min_p + row) > 0):
        is_number = key > NOTHING
        low = tl.min(tl.where(is_number, logit, float("inf")), axis=0)
        high = tl.max(tl.where(is_number, logit, float("-inf")), axis=0)
        tl.store(least + place, key_of(low))
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
        tl.store(cut + place, key_of(high))
        chosen = (logit > high).to(tl.int32)
        slot = place.to(tl.int64) * LISTED
        at = slot + tl.cumsum(chosen, axis=0) - 1
        tl.store(keys + at, key, mask=chosen > 0)
        tl.store(ids + at, column, mask=chosen > 0)
        rest = tl.arange(0, LISTED)
        tl.store(keys + slot + rest, NOTHING, mask=rest >= tl.sum(chosen, axis=0))


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
    bests = tl.load(best + at, mask=exists, other=NOTHING)
    top = tl.max(bests, axis=0)
    token = tl.full([], -1, tl.int64)
    if is_finite(top):
        coldness, u = 1 / tl.load(temperature + row), tl.load(uniform + row)
        share, k, p = tl.load(min_p + row), tl.load(top_k + row), tl.load(top_p + row)
        masses = tl.zeros([TILES], tl.float64)
        if k <= 0:
            sums = tl.load(mass + at, mask=exists, other=0.0)
            masses = sums * weight_of(bests, top, coldness)
        total = tl.sum(masses, axis=0)
        cuts = (k > 0) | (p < 1) | (share > 0)
        reaches = False
        if cuts:
            lowest = tl.max(tl.load(cut + at, mask=exists, other=NOTHING), axis=0)
            slot = tl.arange(0, TILES * LISTED)
            listed = row * tiles * LISTED + slot
            key = tl.load(keys + listed, mask=slot < tiles * LISTED, other=NOTHING)
            found = tl.sum((key > lowest).to(tl.int64), axis=0)
            weight = tl.where(key > lowest, weight_of(key, top, coldness), 0.0)
            reaches = (lowest == NOTHING) | ((k > 0) & (k <= found))
            reaches |= weight_of(lowest, top, coldness) < share
            sum_listed = tl.sum(weight, axis=0)
            reaches |= (k <= 0) & (share <= 0) & (found > 0) & (sum_listed >= p * total)
            if reaches:
                kept = (key > lowest) & (weight >= share)
                bottom = tl.min(tl.where(kept, key, top), axis=0)
                source = (logits, vocab, key, weight, top, coldness)
                floor, ceiling, ties, sum_kept = cut_keys(
                    source, bottom, k, p, tl.where(share > 0, 0.0, total), False, TILE
                )
                first = pick(key, weight, u * sum_kept, 0, floor, ceiling, ties)
                token = tl.load(ids + row * tiles * LISTED + first).to(tl.int64)
        if not reaches:
            floor = tl.full([], NOTHING + 1, tl.int64)
            ceiling, ties = floor, tl.full([], 0, tl.int64)
            seen = tl.zeros([TILES], tl.int64)
            if cuts:
                bottom = tl.min(tl.load(least + at, mask=exists, other=top), axis=0)
                bottom = first_key_of_weight(share, bottom, top, coldness)
                source = (logits, vocab, bests, bests, top, coldness)
                floor, ceiling, ties, _ = cut_keys(
                    source, bottom, k, p, tl.where(share > 0, 0.0, total), True, TILE
                )
                masses, seen = sums_of_tiles(source, floor, ceiling, ties, TILE, TILES)
            before = tl.cumsum(masses, axis=0) - masses
            target = u * tl.sum(masses, axis=0)
            chosen = tl.max(tl.where((masses > 0) & (before <= target), tile, 0), axis=0)
            is_chosen = tile == chosen
            key, weight = load_tile(logits, chosen * TILE, vocab, top, coldness, TILE)
            first = pick(
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
