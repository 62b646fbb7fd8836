"""Log-probabilities of logits: one read of the rows, then a launch that combines (kernels.md 14).

The best of a row are found by a tournament, as in ``selection``: in a strict order, n entries are
the best of all only if their groups are among the n best groups of neighbours, and these only if
their clusters are, groups of groups. How much is read and done does not depend on the logits.

Weights ``exp(logit - best of its tile)`` are taken in float32; their sums, and all that follows, in
float64. Together that stays within 2e-6 of float64 throughout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.reference import sampling as reference
from leadline.kernels.triton.launch import await_previous, overlapped
from leadline.kernels.triton.sampling_cuts import (
    NOTHING,
    column_of,
    is_finite,
    key_of,
    number_of,
    ranked,
    weight_of,
)

_TILE = 4096
_GROUP = 16  # at V = 129280 and 32 of the best, each of three rounds looks at some 512
_MOST = 32


def logprobs(
    logits_RV: Tensor, token_R: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two launches. More than 32 of the best take the definition, as do logits in float64."""
    if logits_RV.dtype != torch.float32 or count > _MOST:
        return reference.logprobs(logits_RV, token_R, count)
    rows, vocab = logits_RV.shape
    device = logits_RV.device
    logprob = torch.empty(rows, dtype=torch.float64, device=device)
    rank = torch.empty(rows, dtype=torch.int64, device=device)
    top = torch.empty(rows, count, dtype=torch.float64, device=device)
    ids = torch.empty(rows, count, dtype=torch.int64, device=device)
    if rows:
        logits_RV = logits_RV.contiguous()
        tiles = triton.cdiv(vocab, _TILE)
        best = torch.empty(rows, tiles, dtype=torch.int32, device=device)
        ahead = torch.empty(rows, tiles, dtype=torch.int32, device=device)
        mass = torch.empty(rows, tiles, dtype=torch.float64, device=device)
        groups = logits_RV.new_empty(rows, tiles * _TILE // _GROUP)
        clusters = logits_RV.new_empty(rows, tiles * _TILE // _GROUP**2)
        _summarise[(tiles, rows)](
            *(logits_RV, token_R, best, ahead, mass, groups, clusters, vocab),
            HAS_TOP=count > 0,
            TILE=_TILE,
            GROUP=_GROUP,
            num_warps=8,
            **overlapped(),
        )
        _combine[(rows,)](
            *(logits_RV, token_R, best, ahead, mass, groups, clusters),
            *(logprob, rank, top, ids, vocab, tiles, count),
            WIDTH=max(triton.next_power_of_2(count), 8) if count else 0,
            TILES=triton.next_power_of_2(tiles),
            TILE=_TILE,
            GROUP=_GROUP,
            num_warps=4,
            **overlapped(),
        )
    return logprob, rank, top, ids


@triton.jit
def _summarise(
    logits,
    tokens,
    best,
    ahead,
    mass,
    groups,
    clusters,
    vocab,
    HAS_TOP: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile: its best key, its sum of weights, how many are ahead of the token; both maxima."""
    await_previous()
    tile, row = tl.program_id(0), tl.program_id(1)
    place = row.to(tl.int64) * tl.num_programs(0) + tile
    logits += row.to(tl.int64) * vocab
    token = tl.load(tokens + row)
    column = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(logits + column, mask=column < vocab, other=float("-inf"))
    chosen = ranked(key_of(tl.load(logits + token)), token)
    key = key_of(logit)
    top = tl.max(key, axis=0)
    total = tl.full([], 0.0, tl.float64)
    if is_finite(top):
        total = tl.sum(tl.exp(logit - number_of(top)).to(tl.float64), axis=0)
    tl.store(best + place, top)
    tl.store(mass + place, total)
    tl.store(ahead + place, tl.sum((ranked(key, column) > chosen).to(tl.int32), axis=0))
    if HAS_TOP:
        key = tl.max(key.reshape(TILE // GROUP, GROUP), axis=1)
        tl.store(groups + place * (TILE // GROUP) + tl.arange(0, TILE // GROUP), number_of(key))
        key = tl.max(key.reshape(TILE // GROUP // GROUP, GROUP), axis=1)
        place = place * (TILE // GROUP // GROUP) + tl.arange(0, TILE // GROUP // GROUP)
        tl.store(clusters + place, number_of(key))


@triton.jit(do_not_specialize=["count"])  # or 1, and multiples of 16, would be compiled apart
def _combine(
    logits,
    tokens,
    best,
    ahead,
    mass,
    groups,
    clusters,
    logprob,
    rank,
    top,
    ids,
    vocab,
    tiles,
    count,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A row: sums over its tiles; the best clusters, of their groups the best, of their ids."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    tile = tl.arange(0, TILES)
    at, exists = row * tiles + tile, tile < tiles
    bests = tl.load(best + at, mask=exists, other=NOTHING)
    highest = tl.max(bests, axis=0)
    log_total = tl.full([], float("nan"), tl.float64)  # of rows without a valid distribution
    if is_finite(highest):
        masses = tl.load(mass + at, mask=exists, other=0.0)
        log_total = tl.log(tl.sum(masses * weight_of(bests, highest, 1.0), axis=0))
        log_total += number_of(highest).to(tl.float64)
    chosen = tl.load(logits + tl.load(tokens + row)).to(tl.float64)
    tl.store(logprob + row, chosen - log_total)
    tl.store(rank + row, 1 + tl.sum(tl.load(ahead + at, mask=exists, other=0), axis=0))
    if WIDTH > 0:
        num_groups, num_clusters = tiles * (TILE // GROUP), tiles * (TILE // GROUP // GROUP)
        cluster = tl.arange(0, max(TILES * (TILE // GROUP // GROUP), WIDTH))
        found = _best(clusters + row * num_clusters, cluster, num_clusters, WIDTH)
        found = _best(groups + row * num_groups, _members(found, GROUP), num_groups, WIDTH)
        found = _best(logits, _members(found, GROUP), vocab, WIDTH)
        slot = tl.arange(0, WIDTH)
        out, wanted = row * count + slot, slot < count
        number = number_of((found >> 32).to(tl.int32))
        tl.store(top + out, number.to(tl.float64) - log_total, mask=wanted)
        tl.store(ids + out, column_of(found), mask=wanted)


@triton.jit
def _best(values, column, count, WIDTH: tl.constexpr):
    """The WIDTH best of the values at some columns, as ``ranked``, descending."""
    value = tl.load(values + column, mask=column < count, other=float("-inf"))
    return tl.topk(ranked(key_of(value), column), WIDTH)


@triton.jit
def _members(found, GROUP: tl.constexpr):
    """Columns of the members of groups."""
    group = column_of(found).to(tl.int32)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return column.reshape(column.numel)
