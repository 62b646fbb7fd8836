"""Sampling: logits to token ids in a few launches, and what changes logits before (kernels.md 14).

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
from leadline.kernels.triton.sampling_cuts import column_of, is_finite, key_of, ranked
from leadline.kernels.triton.sampling_draw import draw, list_borders, probe, summarise
from leadline.kernels.triton.sampling_search import FIRST, SECOND

R = TypeVar("R")

_TILE = 2048
_STRIP = 256  # of a tile, beside the levels at once
_LISTED = 64  # of a tile at most
_FEW = 1024  # entries of a row that are listed without looking closer


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
    """One launch, which reads the logits of mixed words only."""
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
    at = tl.load(rows + index) * vocab + column
    # Whole words are left alone or overwritten unread; what is mixed is written whole, too, as
    # memory is not written by less than 32 bytes.
    logit = tl.load(logits + at, mask=inside & (word != 0), other=float("-inf"))
    logit = tl.where(is_forbidden, float("-inf"), logit)
    tl.store(logits + at, logit, mask=inside & (word != -1))


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
        _best_of_tile[(tiles, rows)](logits_RV, best, vocab, TILE=_TILE, num_warps=4)
        _best_of_row[(rows,)](best, out, tiles, TILES=triton.next_power_of_2(tiles), num_warps=1)
    return out


@triton.jit
def _best_of_tile(logits, best, vocab, TILE: tl.constexpr):
    tile, row = tl.program_id(0), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(
        logits + row.to(tl.int64) * vocab + column, mask=column < vocab, other=float("-inf")
    )
    key = key_of(logit)
    top = tl.max(key, axis=0)
    first = tl.min(tl.where(key == top, column, 0x7FFFFFFF), axis=0)
    tl.store(best + row * tl.num_programs(0) + tile, ranked(top, first))


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
    """Four launches: three that all tiles of a row share, and a program a row.

    The first sums what is drawn from where nothing is cut, and above some levels where top_k or
    top_p cut. The second looks closer where too much lies between two of the levels. The third
    lists the logits around the cut. The last finds the cut among these, then the token. Where the
    lists are too short (more of a tile lie within a thirty-second of a factor e around the cut than
    are listed), it reads the whole row, slowly.
    """
    rows, vocab = logits_RV.shape
    device = logits_RV.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return out
    logits_RV = logits_RV.contiguous()
    tiles = triton.cdiv(vocab, _TILE)
    sizes = {"TILE": _TILE, "TILES": triton.next_power_of_2(tiles)}

    def per_tile(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, tiles, *size, dtype=dtype, device=device)

    row = (logits_RV, temperature_R, min_p_R, top_k_R, top_p_R)
    extremes = (per_tile(dtype=torch.int32), per_tile(dtype=torch.int32))
    mass = per_tile(dtype=torch.float64)
    first, second = (per_tile(levels, dtype=torch.float32) for levels in (FIRST, SECOND))
    found = (
        torch.empty(rows, 4, dtype=torch.int32, device=device),
        torch.empty(rows, 3, dtype=torch.float32, device=device),
    )
    listed = (
        torch.empty(rows, 2, dtype=torch.int32, device=device),
        per_tile(_LISTED, dtype=torch.int32),
        per_tile(2, dtype=torch.int32),
        per_tile(2, dtype=torch.float64),
    )
    grid = (tiles, rows)
    summarise[grid](*(*row, *extremes, first, mass, vocab), TILE=_TILE, STRIP=_STRIP, num_warps=4)
    probe[grid](
        *(*row, *extremes, first, second, *found, vocab, tiles),
        FEW=_FEW,
        STRIP=_STRIP // 2,  # beside twice as many levels
        **sizes,
        num_warps=4,
    )
    list_borders[grid](
        *(*row, second, *found, *listed, vocab, tiles),
        FEW=_FEW,
        LISTED=_LISTED,
        **sizes,
        num_warps=4,
    )
    draw[(rows,)](
        *(*row, uniform_R, *extremes, mass, *listed, out, vocab, tiles),
        LISTED=_LISTED,
        FEW_LISTED=_LISTED // 4,
        **sizes,
        num_warps=8,
    )
    return out
