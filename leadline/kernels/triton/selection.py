"""The best of each row, as ascending positions (kernels.md 7).

A tournament: a row longer than ``_LONGEST`` is reduced to the maxima of groups of neighbours, once
or twice. The k best entries lie in the k best groups, ties included: whichever group stands before
another by its maximum, then by its place, has an entry that stands before all of the other's. So
the best groups are chosen, their members looked at, and the best of those chosen, by one program a
row at a few thousand values a round, whatever the scores are. All SMs read a long row together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.core.errors import ConfigError
from leadline.kernels.triton.choice import choose, extremes, load_keys

_LONGEST = 16384  # values among which a program chooses at once
_VECTOR = 8  # neighbours that a thread looks at together
_PER_THREAD = 32  # values of a program that chooses
_TILE = 8192  # columns whose maxima a program finds


def select_top_k(scores: Tensor, k: int, visible: Tensor | None = None) -> Tensor:
    """Two launches, or one for short rows; nothing is read from ``visible`` on.

    Raises:
        ConfigError: rows are too long for this k: with k up to 1024 longer than 4 M, with 2048
            than 1 M.
    """
    width = min(k, scores.shape[1])
    return _chosen(_levels(scores, width, visible), width, visible)


def select_from_candidates(scores: Tensor, blocks: Tensor, k: int, *, block_size: int) -> Tensor:
    """``select_top_k``, which looks its choices up in the list of blocks."""
    width = min(k, scores.shape[1])
    return _chosen(_levels(scores, width, None), width, None, 1, blocks, block_size)


def select_candidate_blocks(
    scores: Tensor, visible: Tensor, *, block_size: int, topk_blocks: int
) -> Tensor:
    """Blocks are groups whose newest is worth most; two launches. Their size is a power of two."""
    width = min(topk_blocks, triton.cdiv(scores.shape[1], block_size))
    best = _maxima(scores, block_size, _group(width), visible, pins=True)
    best = best[:1] if best[0].shape[1] <= _LONGEST else best
    return _chosen(best, width, visible, block_size)


def _group(k: int) -> int:
    """Values of a group: k groups have at most ``_LONGEST``."""
    return max(1, min(16, _LONGEST // triton.next_power_of_2(max(k, 1))))


def _levels(scores: Tensor, k: int, visible: Tensor | None) -> list[Tensor]:
    """The scores and, above them, the maxima of groups and of groups of groups."""
    if scores.shape[1] <= _LONGEST:
        return [scores]
    best = _maxima(scores, _group(k), _group(k), visible, pins=False)
    return [scores, *(best[:1] if best[0].shape[1] <= _LONGEST else best)]


def _maxima(
    scores: Tensor, first: int, second: int, visible: Tensor | None, *, pins: bool
) -> list[Tensor]:
    """Maxima of groups of ``first`` columns, and of groups of ``second`` of those; NaN is -inf.

    Undefined from a row's ``visible`` on. With ``pins``, the group of its last one is infinite.
    """
    rows, columns = scores.shape
    count = triton.cdiv(columns, first)
    best = scores.new_empty(rows, count)
    best_of_best = scores.new_empty(rows, triton.cdiv(count, second))
    if rows:
        # Rows first: of other dimensions a grid has 65535 at most.
        _group_maxima[(rows, triton.cdiv(columns, _TILE))](
            *(scores, visible, best, best_of_best),
            *(scores.stride(0), columns, count, best_of_best.shape[1]),
            FIRST=first,
            SECOND=second,
            TILE=_TILE,
            PINS=pins,
            num_warps=8,
        )
    return [best, best_of_best]


@triton.jit
def _group_maxima(
    scores,
    visible,
    best,
    best_of_best,
    stride,
    columns,
    count,
    count_above,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TILE: tl.constexpr,
    PINS: tl.constexpr,
):
    """Both levels of maxima of one tile of a row."""
    row = tl.program_id(0).to(tl.int64)
    seen = columns
    if visible is not None:
        seen = tl.load(visible + row).to(tl.int32)
    if tl.program_id(1) * TILE >= seen:
        return
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(scores + row * stride + column, mask=column < seen, other=-float("inf"))
    x = x.to(tl.float32)
    x = tl.where(x == x, x, -float("inf"))
    x = tl.max(x.reshape(TILE // FIRST, FIRST), axis=1)
    place = tl.program_id(1) * (TILE // FIRST) + tl.arange(0, TILE // FIRST)
    if PINS:
        x = tl.where(place == (seen - 1) // FIRST, float("inf"), x)
    # Maxima are values of the scores' type: nothing is rounded.
    tl.store(best + row * count + place, x.to(best.dtype.element_ty), mask=place < count)
    x = tl.max(x.reshape(TILE // FIRST // SECOND, SECOND), axis=1)
    place = tl.program_id(1) * (TILE // FIRST // SECOND) + tl.arange(0, TILE // FIRST // SECOND)
    inside = place < count_above
    tl.store(best_of_best + row * count_above + place, x.to(best.dtype.element_ty), mask=inside)


def _chosen(
    levels: list[Tensor],
    k: int,
    visible: Tensor | None,
    unit: int = 1,
    blocks: Tensor | None = None,
    block_size: int = 1,
) -> Tensor:
    """The k best of the lowest level, of whose columns each stands for ``unit`` visible ones."""
    rows, columns = levels[0].shape
    group = _group(k)
    chosen = torch.empty(rows, k, dtype=torch.int64, device=levels[0].device)
    top = levels[-1].shape[1]
    if top > _LONGEST:
        raise ConfigError(
            f"a row of {columns} scores is too long to select {k} of; "
            f"at most {_LONGEST * group ** (len(levels) - 1)} are possible"
        )
    if rows and k:
        sizes = [(level, level.stride(0), level.shape[1]) for level in levels]
        low, middle, high = sizes + sizes[-1:] * (3 - len(sizes))
        at_once = triton.next_power_of_2(top)
        width = triton.next_power_of_2(k)
        most = max(at_once, width * group if len(levels) > 1 else 1)
        _choose_rows[(rows,)](
            *(*low, *middle, *high, visible, chosen, blocks),
            *(0 if blocks is None else blocks.stride(0), k),
            LEVELS=len(levels),
            TOP=at_once,
            WIDTH=width,
            GROUP=group,
            UNIT=unit,
            BLOCK_SIZE=block_size,
            VECTOR=min(_VECTOR, at_once, block_size if blocks is not None else _VECTOR),
            THREADS=32 * (warps := min(max(most // 32 // _PER_THREAD, 4), 32)),
            num_warps=warps,
        )
    return chosen


@triton.jit
def _choose_rows(
    low,
    low_stride,
    low_count,
    middle,
    middle_stride,
    middle_count,
    high,
    high_stride,
    high_count,
    visible,
    chosen,
    blocks,
    blocks_stride,
    k,
    LEVELS: tl.constexpr,
    TOP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Choose among the highest of LEVELS, then among the members of what was chosen."""
    row = tl.program_id(0).to(tl.int64)
    if visible is not None:
        low_count = tl.minimum(low_count, tl.cdiv(tl.load(visible + row).to(tl.int32), UNIT))
        middle_count = tl.minimum(middle_count, tl.cdiv(low_count, GROUP))
        high_count = low_count if LEVELS == 1 else middle_count
        if LEVELS == 3:
            high_count = tl.cdiv(middle_count, GROUP)
    out = chosen + row * k
    listed = blocks
    if blocks is not None:
        listed = blocks + row * blocks_stride
    first = tl.arange(0, TOP // VECTOR) * VECTOR
    keys = load_keys(high + row * high_stride, high_count, first, VECTOR)
    # Not fewer than k groups of neighbours reach the least of their maxima.
    best = tl.max(keys.reshape(WIDTH, TOP // WIDTH), axis=1)
    floor, ceiling = extremes(best)
    last = None if LEVELS > 1 else listed
    floor = choose(keys, first, floor, ceiling, False, k, out, last, WIDTH, BLOCK_SIZE, THREADS)
    PART: tl.constexpr = min(VECTOR, GROUP)
    if LEVELS == 3:
        first = _members(out, k, WIDTH, GROUP, PART)
        keys = load_keys(middle + row * middle_stride, middle_count, first, PART)
        floor = choose(keys, first, floor, ceiling, True, k, out, None, WIDTH, BLOCK_SIZE, THREADS)
    if LEVELS >= 2:
        first = _members(out, k, WIDTH, GROUP, PART)
        keys = load_keys(low + row * low_stride, low_count, first, PART)
        choose(keys, first, floor, ceiling, True, k, out, listed, WIDTH, BLOCK_SIZE, THREADS)


@triton.jit
def _members(chosen, k, WIDTH: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr):
    """First positions of the parts of the chosen groups; negative where none was chosen."""
    tl.debug_barrier()  # other threads wrote them
    part = tl.arange(0, WIDTH * (GROUP // PART))
    slot = part // (GROUP // PART)
    group = tl.load(chosen + slot, mask=slot < k, other=-1).to(tl.int32)
    tl.debug_barrier()  # before they are written over
    return group * GROUP + part % (GROUP // PART) * PART
