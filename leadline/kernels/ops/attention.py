"""Sparse attention over the window and the selected entries, with a sink."""

from __future__ import annotations

from torch import Tensor

from leadline.kernels.packed import RecordField
from leadline.kernels.reference import attention
from leadline.kernels.registry import op


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
    visible: Tensor | None = None,
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
        selected: ``[m, <= K]`` int64 entries, ascending, -1 behind them; None without ``kv``, and
            with ``visible``.
        sink: ``[H]`` wide, in the denominator only.
        exact_rounding: with bf16 activations, round probabilities in 64-slot blocks as the
            reference program does. For the reference: backends that fuse the softmax choose
            their own blocks.
        visible: ``[m]`` int64, with ``kv`` and in place of ``selected``: each row attends to so
            many entries, the first ones (v4-model 3.7). No list of them is made.
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
        visible=visible,
        lse=lse,
        fp8=fp8,
    )
