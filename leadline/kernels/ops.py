"""The operations of the forward: one contract each, and the only kernels that models call.

Shapes: m rows of a step (all groups, packed), g groups, D hidden_size, S hc_mult, H query heads,
d head_dim, r qk_rope_head_dim, Hi index heads, di index_head_dim, E experts, F expert width,
W window, K selected entries, N visible entries, n longest n-gram.

Activations are bf16, float32 or float64; "wide" means float32, or float64 for float64 activations.
Where activations are bf16, each op rounds where v41-model 4.5 says and nowhere else. Section
numbers refer to ``v41-model`` unless another specification is named.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from leadline.kernels.packed import RecordField, Weight
from leadline.kernels.reference import (
    attention,
    compressor,
    engram,
    experts,
    indexer,
    kv_store,
    mhc,
    norm,
    rope,
    router,
    sampling,
    window,
)
from leadline.kernels.reference import linear as linear_
from leadline.kernels.reference.quant import round_trip_fp4_32, store_fp8_32
from leadline.kernels.registry import op

# These make no non-finite value of their own, so nothing watches them; contracts are at home.
_unwatched = op(watched=False)
pack_rows = _unwatched(kv_store.pack_rows)
unpack_rows = _unwatched(kv_store.unpack_rows)
store_rows = _unwatched(kv_store.store_rows)
rope_angles = _unwatched(rope.rope_angles)
engram_history = _unwatched(engram.engram_history)
engram_hash = _unwatched(engram.engram_hash)
gather_rows = _unwatched(engram.gather_rows)
plan_window = _unwatched(window.plan_window)
commit_window = _unwatched(window.commit_window)
# Logits to ids, and how likely ids were: see ``reference.sampling``. -inf and NaN logits are
# theirs to handle.
apply_bitmask = _unwatched(sampling.apply_bitmask)
apply_penalties = _unwatched(sampling.apply_penalties)
counter_uniform = sampling.counter_uniform
greedy = _unwatched(sampling.greedy)
logprobs = _unwatched(sampling.logprobs)
sample = _unwatched(sampling.sample)


@op()
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Root-mean-square norm with the weight multiplied before the one rounding (2.2).

    Args:
        x: ``[m, n]`` activations.
        weight: ``[n]`` wide.
        eps: added to the mean square.

    Returns:
        ``[m, n]`` activations.
    """
    return norm.rms_norm(x, weight, eps=eps)


@op()
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last r channels, adjacent pairs being complex numbers (3.2).

    Args:
        x: ``[m, n]`` or ``[m, heads, n]`` activations.
        cos: ``[m, r / 2]`` float32.
        sin: ``[m, r / 2]`` float32.

    Returns:
        The shape and dtype of ``x``.
    """
    return rope.rotate(x, cos, sin)


@op()
def linear(x: Tensor, weight: Weight) -> Tensor:
    """``x W^T``; the input is quantised to MXFP8 (1 x 32) first where W was packed (7.3).

    Args:
        x: ``[m, in]`` activations.
        weight: ``[out, in]``.

    Returns:
        ``[m, out]`` activations.
    """
    return linear_.linear(x, weight)


@op()
def grouped_linear(x: Tensor, weight: Weight) -> Tensor:
    """One matrix per output group; the input is never quantised (3.8).

    Args:
        x: ``[m, G, in]`` activations.
        weight: ``[G, out, in]``.

    Returns:
        ``[m, G, out]`` activations.
    """
    return linear_.grouped_linear(x, weight)


@op()
def output_projection(x: Tensor, wo_a: Weight, wo_b: Weight) -> Tensor:
    """Outputs of the heads, rotated back, through two low-rank matrices (3.8, kernels.md 9).

    Args:
        x: ``[m, H, d]`` activations.
        wo_a: ``[G, out, H d / G]``, see ``grouped_linear``.
        wo_b: ``[D, G out]``, see ``linear``.

    Returns:
        ``[m, D]`` activations.
    """
    grouped = x.flatten(1).unflatten(1, (wo_a.shape[0], -1))
    return linear(grouped_linear(grouped, wo_a).flatten(1), wo_b)


@op()
def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """A wide product of wide operands: the head and the gated compressors (2.1, 3.3).

    Args:
        x: ``[m, in]`` activations.
        weight: ``[out, in]`` wide, or bf16 where that is exact.

    Returns:
        ``[m, out]`` wide.
    """
    return linear_.wide_linear(x, weight)


@op()
def mhc_coefficients(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    sinkhorn_iters: int,
    hc_eps: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing coefficients of one site (2.3).

    Args:
        streams: ``[m, S, D]`` activations, the streams before the sublayer.
        fn: ``[S (S + 2), S D]`` wide.
        base: ``[S (S + 2)]`` wide.
        scale: ``[3]`` wide, for the pre, post and comb entries.
        sinkhorn_iters: rounds, the first being softmax and a column step.
        hc_eps: added to ``pre``, after the softmax and in every denominator.
        eps: of the rms statistic, one over all S D values of a row.

    Returns:
        ``pre [m, S]``, ``post [m, S]`` and ``comb [m, S, S]`` (``[incoming, outgoing]``), wide.
    """
    return mhc.mhc_coefficients(
        streams, fn, base, scale, sinkhorn_iters=sinkhorn_iters, hc_eps=hc_eps, eps=eps
    )


@op()
def mhc_collapse(streams: Tensor, mix: Tensor) -> Tensor:
    """One row from S streams: ``sum_s mix[s] X[s]`` (2.3).

    Args:
        streams: ``[m, S, D]`` activations.
        mix: ``[m, S]`` wide.

    Returns:
        ``[m, D]`` activations.
    """
    return mhc.mhc_collapse(streams, mix)


@op()
def mhc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams: ``X[o] <- post[o] y + sum_i comb[i, o] X[i]``, one rounding (2.3).

    Args:
        y: ``[m, D]`` activations, the sublayer's output.
        streams: ``[m, S, D]`` activations.
        post: ``[m, S]`` wide.
        comb: ``[m, S, S]`` wide.

    Returns:
        ``[m, S, D]`` activations.
    """
    return mhc.mhc_expand(y, streams, post, comb)


@op()
def mhc_enter(
    streams: Tensor,
    mix: Tensor,
    norm_weight: Tensor,
    *,
    eps: float,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """What a sublayer reads: ``mhc_collapse``, then ``rms_norm``.

    Args:
        streams: ``[m, S, D]`` activations.
        mix: ``[m, S]`` wide.
        norm_weight: ``[D]`` wide.
        eps: of the norm.
        fp8: codes ``[m, D]`` and exponents ``[m, D / 32]``, uint8, contiguous; receive the result
            as ``quantize_fp8_32`` encodes it, for products that take their input so. None for none.

    Returns:
        ``[m, D]`` activations.
    """
    u = rms_norm(mhc_collapse(streams, mix), norm_weight, eps=eps)
    if fp8 is not None:
        store_fp8_32(u, *fp8)
    return u


@op()
def mhc_seam(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    mix: Tensor,
    norm_weight: Tensor,
    *,
    eps: float,
    fp8: tuple[Tensor, Tensor] | None = None,
    mean: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """From one sublayer to the next: ``mhc_expand``, then ``mhc_enter`` (kernels.md 1).

    Args:
        y: ``[m, D]`` activations, the finished sublayer's output.
        streams: ``[m, S, D]`` activations, as they were before it.
        post: ``[m, S]`` wide, of the finished sublayer.
        comb: ``[m, S, S]`` wide, of the finished sublayer.
        mix: ``[m, S]`` wide, ``pre`` of the site before the next one.
        norm_weight: ``[D]`` wide, of the next sublayer.
        eps: of the norm.
        fp8: of the next sublayer's input, as in ``mhc_enter``.
        mean: ``[m, D]`` activations, rows contiguous; receives the mean over the new streams: what
            draft layers read of a block that begins here (8.1). None for none.

    Returns:
        The new streams ``[m, S, D]`` and the next sublayer's input ``[m, D]``, activations.
    """
    expanded = mhc_expand(y, streams, post, comb)
    if mean is not None:
        mean.copy_(mhc.mhc_mean(expanded))
    return expanded, mhc_enter(expanded, mix, norm_weight, eps=eps, fp8=fp8)


@_unwatched
def norm_rotate_store(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    field: RecordField,
    outer: Tensor,
    inner: Tensor,
    *,
    eps: float,
) -> None:
    """Rows to a cache: ``rms_norm``, ``rotate``, ``pack_rows``, ``store_rows`` (kernels.md 4).

    Args:
        x: ``[m, n]`` activations, not normalised.
        weight: ``[n]`` wide.
        cos: ``[m, r / 2]`` float32.
        sin: ``[m, r / 2]`` float32.
        field: pages or rings.
        outer: ``[m]`` int64 page ids or slots; rows where it is negative are not stored.
        inner: ``[m]`` int64 entries of the page or rows of the ring; no address may come twice.
        eps: of the norm.
    """
    stored = (outer >= 0).nonzero().squeeze(1)
    values, scales = pack_rows(rotate(rms_norm(x, weight, eps=eps), cos, sin), field.record)
    store_rows(field, outer[stored], inner[stored], values, scales, rows=stored)


@op()
def norm_query_store_window(
    down: Tensor,
    query_weight: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: RecordField,
    outer: Tensor,
    inner: Tensor,
    *,
    eps: float,
) -> Tensor:
    """Both halves of a down-projection: the query normalised, the rest stored (kernels.md 4).

    Args:
        down: ``[m, q_lora_rank + d]`` activations, the query's part first.
        query_weight: ``[q_lora_rank]`` wide.
        weight: ``[d]`` wide; it and what follows as in ``norm_rotate_store`` of the second part.
        cos: ``[m, r / 2]`` float32.
        sin: ``[m, r / 2]`` float32.
        window: rings, and room for staged rows behind them.
        outer: ``[m]`` int64, negative where nothing is stored.
        inner: ``[m]`` int64.
        eps: of both norms.

    Returns:
        ``[m, q_lora_rank]`` activations.
    """
    rank = query_weight.shape[0]
    norm_rotate_store(down[:, rank:], weight, cos, sin, window, outer, inner, eps=eps)
    return rms_norm(down[:, :rank], query_weight, eps=eps)


@_unwatched
def store_entries(
    projected: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    pos: Tensor,
    req_of_row: Tensor,
    q_off: Tensor,
    slot: Tensor,
    seq_len: Tensor,
    write_from: Tensor,
    page_table: Tensor,
    entries: RecordField,
    open_groups: Tensor | None,
    *,
    ratio: int,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Pool, normalise, rotate, pack and store every entry that a step completes (3.3).

    A group is stored iff it closes at or above its request's ``write_from``. The rows of a group
    that began in an earlier step come from the ring, which then keeps the newest rows of this one.

    Args:
        projected: ``[m, 2 d]`` wide, values then gates; or ``[m, d]`` activations of ratio 1.
        norm: ``[d]`` wide.
        cos: ``[m, r / 2]`` float32, for the row at p at the position ``p - ratio + 1``.
        sin: ``[m, r / 2]`` float32.
        pos: ``[m]`` int64; the rows of a request are consecutive.
        req_of_row: ``[m]`` int64, group of each row; -1 for padding, which nothing comes of.
        q_off: ``[g + 1]`` first row of each group, then m.
        slot: ``[g]`` int64.
        seq_len: ``[g]`` int64, the group's last position of this step plus one.
        write_from: ``[g]`` int64.
        page_table: ``[g, max pages]`` int64.
        entries: pages of the KV source.
        open_groups: ``[slots, ring, 2 d]`` wide, rows by ``position % ring``; None with ratio 1.
        ratio: tokens of a group; ``ring >= ratio - 1``.
        eps: of the norm.
        dtype: of activations.

    Returns:
        ``[m, d]`` activations: the latent, not rotated, at each row that stores an entry. Other
        rows are undefined.
    """
    return compressor.store_entries(
        projected,
        norm,
        cos,
        sin,
        pos,
        req_of_row,
        q_off,
        slot,
        seq_len,
        write_from,
        page_table,
        entries,
        open_groups,
        ratio=ratio,
        eps=eps,
        dtype=dtype,
    )


@_unwatched
def store_index_keys(
    latent: Tensor,
    weight: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    pos: Tensor,
    req_of_row: Tensor,
    write_from: Tensor,
    page_table: Tensor,
    keys: RecordField,
    *,
    ratio: int,
    eps: float,
) -> None:
    """Project, normalise, rotate, pack and store the index key of every stored entry (3.4).

    Args:
        latent: ``[m, d]`` activations of ``store_entries``; rows that store nothing are not read.
        weight: ``[di, d]``; the input of its product is not quantised.
        norm: ``[di]`` wide.
        cos: as in ``store_entries``, like all that is not named here.
        sin: likewise.
        pos: likewise.
        req_of_row: likewise.
        write_from: likewise.
        page_table: likewise.
        keys: pages of index keys.
        ratio: tokens of a group.
        eps: of the norm.
    """
    compressor.store_index_keys(
        latent,
        weight,
        norm,
        cos,
        sin,
        pos,
        req_of_row,
        write_from,
        page_table,
        keys,
        ratio=ratio,
        eps=eps,
    )


@op()
def quantize_index_query(q: Tensor) -> Tensor:
    """Index queries rounded to the MXFP4 grid of the keys (3.5, 4.3): ``[m, Hi, di]``."""
    return round_trip_fp4_32(q)


@op()
def prepare_index_query(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``quantize_index_query(rotate(q, cos, sin))``, which may be one launch (kernels.md 5.1).

    Args:
        q: ``[m, Hi, di]`` activations, not rotated.
        cos: ``[m, r / 2]`` float32.
        sin: ``[m, r / 2]`` float32.

    Returns:
        ``[m, Hi, di]`` activations.
    """
    return indexer.prepare_index_query(q, cos, sin)


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


@_unwatched
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


@_unwatched
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


@_unwatched
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


@op()
def sparse_attention(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: RecordField,
    window_index: Tensor,
    window_width: Tensor,
    kv: RecordField | None,
    page_table: Tensor,
    req_of_row: Tensor,
    selected: Tensor | None,
    sink: Tensor,
    *,
    exact_rounding: bool,
    lse: Tensor | None = None,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention over window rows and selected entries in one softmax, K = V (3.7).

    Queries are rotated before and outputs rotated back after (kernels.md 8.1).

    Args:
        q: ``[m, H, d]`` activations, not rotated.
        cos: ``[m, r / 2]`` float32 at each row's position.
        sin: ``[m, r / 2]`` float32.
        window: rings, and this step's staged rows behind them.
        window_index: ``[m, W]`` int64 of ``plan_window``: ``outer * rows of an outer unit + inner``
            of each row of ``window``, oldest first, -1 behind them.
        window_width: ``[m]`` int64, slots that the window takes in the reference's slot list.
        kv: compressed entries of the KV source, or None for window-only layers.
        page_table: ``[g, max pages]`` int64.
        req_of_row: ``[m]`` int64, group of each row.
        selected: ``[m, <= K]`` int64 entries, ascending, -1 behind them; None without ``kv``.
        sink: ``[H]`` wide, in the denominator only.
        exact_rounding: with bf16 activations, round probabilities in 64-slot blocks as the
            reference program does. For the reference: backends that fuse the softmax choose
            their own blocks.
        lse: ``[m, H]`` wide, contiguous; receives ``ln sum exp(score)`` over the keys of a row, the
            sink not being one: -inf without keys. For ranks that each hold a part of a context:
            attending with sinks of -inf, they merge by
            ``sum_i exp(lse_i) out_i / (sum_i exp(lse_i) + exp(sink))``. None for none.
        fp8: codes ``[m, H, d]`` and exponents ``[m, H, d / 32]``, uint8, contiguous; receive the
            result as ``quantize_fp8_32`` encodes it, for an output projection that takes its input
            so. None for none.

    Returns:
        ``[m, H, d]`` activations; a row without keys gives 0.
    """
    return attention.sparse_attention(
        q,
        cos,
        sin,
        window,
        window_index,
        window_width,
        kv,
        page_table,
        req_of_row,
        selected,
        sink,
        exact_rounding=exact_rounding,
        lse=lse,
        fp8=fp8,
    )


@op()
def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    req_of_row: Tensor | None = None,
    image_rows: Tensor | None = None,
    image_bias: Tensor | None = None,
    *,
    num_experts_per_tok: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Experts of each row and their weights (5.1); of equal ones the lower id (kernels.md 2).

    Args:
        x: ``[m, D]`` activations.
        gate: ``[E, D]`` activations or wide; the product is wide.
        bias: ``[E]`` wide; selects only.
        req_of_row: ``[m]`` int64, group of each row; -1 for padding, which chooses nobody. None
            where no row is padding.
        image_rows: ``[m]`` bool, tokens of images; None where all are of text.
        image_bias: ``[E]`` wide, ``bias_vl``: selects in place of ``bias`` there. Comes with
            ``image_rows``.
        num_experts_per_tok: experts of a row.
        scale: ``routed_scaling_factor``.

    Returns:
        ``[m, k]`` int64 expert ids, ascending, or -1 of padding; and ``[m, k]`` wide weights.
    """
    return router.route(
        x,
        gate,
        bias,
        req_of_row,
        image_rows,
        image_bias,
        num_experts_per_tok=num_experts_per_tok,
        scale=scale,
    )


@op()
def hash_route(
    x: Tensor,
    gate: Tensor,
    tid2eid: Tensor,
    token_ids: Tensor,
    req_of_row: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``route`` where the token says which experts, as V4's first layers have it (kernels.md 2).

    Args:
        x: ``[m, D]`` activations.
        gate: ``[E, D]`` activations or wide; the product is wide.
        tid2eid: ``[V, k]`` int32 or int64, k different experts of each token id, in any order.
        token_ids: ``[m]`` int32 or int64; below V, those of padding too.
        req_of_row: as in ``route``.
        scale: ``routed_scaling_factor``.

    Returns:
        As ``route``: the table's ids, ascending, and their weights.
    """
    return router.hash_route(x, gate, tid2eid, token_ids, req_of_row, scale=scale)


@op()
def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Weight,
    w2: Weight,
    *,
    limit: float,
    row_scales: bool = False,
    shared: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Sum of the chosen experts' outputs, in ascending expert order (5.2, 5.3).

    Args:
        x: ``[m, D]`` activations.
        ids: ``[m, k]`` int64, ascending; -1 (masked, or not of this rank) adds nothing.
        weights: ``[m, k]`` wide; multiplied into the hidden row before its rounding.
        w13: ``[E, 2 F, D]``, gate rows first.
        w2: ``[E, D, F]``.
        limit: ``swiglu_limit``.
        row_scales: inputs that are quantised get one power of two a row instead of one for 32
            channels (``quant.round_trip_fp8_row``), for FP8 tensor cores; an approximation. Where
            these would not be faster a backend may keep the finer scales.
        shared: gives ``[m, D]`` activations, the shared expert's output, which is added last: asked
            once the products have been launched, since it may have to wait.

    Returns:
        ``[m, D]`` activations, rounded once; without ``shared`` wide, not rounded.
    """
    return experts.routed_experts(
        x, ids, weights, w13, w2, limit=limit, row_scales=row_scales, shared=shared
    )


@op()
def shared_expert(x: Tensor, w13: Weight, w2: Weight, *, limit: float) -> Tensor:
    """The shared expert (5.3): ``[m, D]`` -> ``[m, D]`` activations.

    Args:
        x: ``[m, D]`` activations.
        w13: ``[2 F, D]``, gate rows first.
        w2: ``[D, F]``.
        limit: ``swiglu_limit``.
    """
    return experts.shared_expert(x, w13, w2, limit=limit)


@op()
def engram_inject(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, live: Tensor, *, eps: float
) -> Tensor:
    """Add gated n-gram values to every stream (6.4).

    Args:
        streams: ``[m, S, D]`` activations.
        kv: ``[m, (S + 1) D]`` activations: a key per stream, then the value.
        q_weight: ``[S, D]``.
        k_weight: ``[S, D]``.
        live: ``[m]`` bool; rows of images and padding stay untouched.
        eps: of both statistics.

    Returns:
        ``[m, S, D]`` activations.
    """
    return engram.engram_inject(streams, kv, q_weight, k_weight, live, eps=eps)
