"""Index queries and scores, top-k selection and candidate blocks."""

from __future__ import annotations

from torch import Tensor

from leadline.kernels.packed import RecordField
from leadline.kernels.reference import indexer
from leadline.kernels.reference.quant import round_trip_fp4_32
from leadline.kernels.registry import op


@op()
def quantize_index_query(q: Tensor) -> Tensor:
    """Index queries rounded to the MXFP4 grid of the keys (3.5, 4.3): ``[m, Hi, di]``."""
    return round_trip_fp4_32(q)


@op()
def prepare_index_query(q: Tensor, cos: Tensor, sin: Tensor, *, hadamard: bool = False) -> Tensor:
    """``quantize_index_query(rotate(q, cos, sin))``, which may be one launch (kernels.md 5.1).

    Args:
        q: ``[m, Hi, di]`` activations, not rotated.
        cos: ``[m, r / 2]`` float32.
        sin: ``[m, r / 2]`` float32.
        hadamard: through ``reference.hadamard`` before it is quantised, as V4's keys are.

    Returns:
        ``[m, Hi, di]`` activations.
    """
    return indexer.prepare_index_query(q, cos, sin, hadamard=hadamard)


@op()
def index_logits(
    q: Tensor,
    weights: Tensor,
    keys: RecordField,
    page_table: Tensor,
    req_of_row: Tensor,
    visible: Tensor,
    num_entries: int,
    *,
    exact_rounding: bool,
) -> Tensor:
    """Scores of every visible entry: ``sum_h relu(q_h . k_j) w_h`` (3.5, kernels.md 5.2).

    Args:
        q: ``[m, Hi, di]`` activations, rotated and rounded as the keys are.
        weights: ``[m, Hi]`` activations, already scaled.
        keys: paged index keys of the KV source.
        page_table: ``[g, max pages]`` int64.
        req_of_row: ``[m]`` int64, group of each row, ascending.
        visible: ``[m]`` int64, entries that each row may see.
        num_entries: N, the columns: at least every row's ``visible``, within the page table.
        exact_rounding: with bf16 activations, round the dot and the weighted product to bf16 as
            the reference program does; otherwise only the sum is rounded.

    Returns:
        ``[m, N]`` activations; undefined from ``visible`` on, but never NaN where it is watched.
    """
    return indexer.index_logits(
        q,
        weights,
        keys,
        page_table,
        req_of_row,
        visible,
        num_entries,
        exact_rounding=exact_rounding,
    )


@op()
def candidate_logits(
    q: Tensor,
    weights: Tensor,
    keys: RecordField,
    page_table: Tensor,
    req_of_row: Tensor,
    blocks: Tensor,
    visible: Tensor,
    *,
    block_size: int,
    exact_rounding: bool,
) -> Tensor:
    """``index_logits`` of candidates only, in candidate order (kernels.md 6).

    Args:
        q: ``[m, Hi, di]`` activations, rotated and rounded as the keys are.
        weights: ``[m, Hi]`` activations, already scaled.
        keys: paged index keys of the KV source; a page holds whole blocks.
        page_table: ``[g, max pages]`` int64.
        req_of_row: ``[m]`` int64, group of each row.
        blocks: ``[m, B]`` int64 of ``select_candidate_blocks``.
        visible: ``[m]`` int64, entries that each row may see.
        block_size: ``candidate_block_size``.
        exact_rounding: as in ``index_logits``.

    Returns:
        ``[m, B * block_size]`` activations; -inf where there is no block or not visible.
    """
    return indexer.candidate_logits(
        q,
        weights,
        keys,
        page_table,
        req_of_row,
        blocks,
        visible,
        block_size=block_size,
        exact_rounding=exact_rounding,
    )


@op(watched=False)
def select_top_k(scores: Tensor, k: int, visible: Tensor | None = None) -> Tensor:
    """The k best entries of each row, ascending (3.5, kernels.md 7).

    Among equal scores the larger position wins. NaN counts as -inf, and -inf is never chosen, so
    every returned position is a valid entry or -1.

    Args:
        scores: ``[m, N]`` activations.
        k: ``index_topk``.
        visible: ``[m]`` int64, leading columns that count, whatever the others hold; None for all.

    Returns:
        ``[m, min(k, N)]`` int64, -1 behind the last choice.
    """
    return indexer.select_top_k(scores, k, visible)


@op(watched=False)
def select_candidate_blocks(
    scores: Tensor, visible: Tensor, *, block_size: int, topk_blocks: int
) -> Tensor:
    """First-level selection: the best blocks of aligned positions (3.6, kernels.md 7).

    A block is worth its best score; ties, NaN and -inf are as in ``select_top_k``.

    Args:
        scores: ``[m, N]`` activations; whatever they hold from ``visible`` on.
        visible: ``[m]`` int64; the block of entry ``visible - 1`` is always kept.
        block_size: ``candidate_block_size``.
        topk_blocks: ``candidate_topk_blocks``.

    Returns:
        ``[m, min(topk_blocks, blocks)]`` int64 block numbers, ascending, -1 behind the last.
    """
    return indexer.select_candidate_blocks(
        scores, visible, block_size=block_size, topk_blocks=topk_blocks
    )


@op(watched=False)
def select_from_candidates(scores: Tensor, blocks: Tensor, k: int, *, block_size: int) -> Tensor:
    """``select_top_k`` in candidate order, as entries: what masking all others would select.

    Args:
        scores: ``[m, B * block_size]`` activations of ``candidate_logits``.
        blocks: ``[m, B]`` int64, ascending, -1 behind them.
        k: ``index_topk``.
        block_size: ``candidate_block_size``.

    Returns:
        ``[m, min(k, B * block_size)]`` int64 entries, ascending, -1 behind the last choice.
    """
    return indexer.select_from_candidates(scores, blocks, k, block_size=block_size)
