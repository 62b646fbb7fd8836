"""CSA2 attention: a private window, and entries of a shared compressed cache (v41-model 3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from leadline.config.model import ModelConfig
from leadline.kernels import ops
from leadline.kernels.packed import RecordField, Weight
from leadline.kernels.reference.blocks import rows_of_scores
from leadline.models.batch import CacheFields
from leadline.models.common.parameters import Parameters
from leadline.models.common.rows import Rows, WindowPlan
from leadline.models.common.side_stream import SideStream


@dataclass(slots=True)
class Selection:
    """What index sources publish to the layers above them, within one half of one step.

    Attributes:
        entries: ``[r, <= K]`` selected entries, ascending, -1 behind them.
        candidates: ``[r, <= topk_blocks]`` blocks of entries, ascending, -1 behind them, or None
            where every visible entry is a candidate.
    """

    entries: Tensor | None = None
    candidates: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepRows:
    """Everything that the attention layers of one half need to know about its rows.

    Attributes:
        plain: cos and sin ``[r, rope / 2]`` for window-only layers.
        yarn: the same for layers with a compressed cache.
        entry_angles: for each ratio, the same where the group that a row closes begins; empty
            where nothing is compressed.
        visible: for each ratio, ``[r]`` entries that each row may see.
    """

    rows: Rows
    window: WindowPlan
    plain: tuple[Tensor, Tensor]
    yarn: tuple[Tensor, Tensor]
    visible: dict[int, Tensor]
    entry_angles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Compressor:
    """Makes the compressed entries and index keys of a KV source (3.3, 3.4)."""

    def __init__(self, params: Parameters, prefix: str, config: ModelConfig, ratio: int) -> None:
        self.ratio, self.eps = ratio, config.rms_norm_eps
        self.norm = params.tensor(f"{prefix}.compressor.norm.weight")
        self.k_norm = params.tensor(f"{prefix}.indexer.k_norm.weight")
        self.wk = params.linear(f"{prefix}.indexer.wk").dense
        self.gated: Tensor | None = None
        if ratio == 1:
            self.wkv = params.linear(f"{prefix}.compressor.wkv")
        else:  # values and gates in one wide product
            names = (f"{prefix}.compressor.{part}.weight" for part in ("wkv", "wgate"))
            self.gated = params.wide_linear(*names)

    def write(
        self,
        u: Tensor,
        step: StepRows,
        kv: RecordField,
        index: RecordField,
        open_groups: Tensor | None,
    ) -> None:
        """Store the entries and keys that the rows ``u [r, D]`` complete."""
        rows, angles = step.rows, step.entry_angles[self.ratio]
        if self.gated is None:
            projected = ops.linear(u, self.wkv)
        else:
            projected = ops.wide_linear(u, self.gated)
        latent = ops.store_entries(
            projected,
            self.norm,
            *angles,
            rows.pos,
            rows.req_of_row,
            rows.q_off,
            rows.slot,
            rows.seq_len,
            rows.write_from,
            rows.page_table,
            kv,
            open_groups,
            ratio=self.ratio,
            eps=self.eps,
            dtype=u.dtype,
        )
        ops.store_index_keys(
            latent,
            self.wk,
            self.k_norm,
            *angles,
            rows.pos,
            rows.req_of_row,
            rows.write_from,
            rows.page_table,
            index,
            ratio=self.ratio,
            eps=self.eps,
        )


class Indexer:
    """Scores entries and selects the best (3.5, 3.6)."""

    def __init__(
        self, params: Parameters, prefix: str, config: ModelConfig, layer: int, exact_rounding: bool
    ) -> None:
        self.exact_rounding = exact_rounding
        self.num_heads, self.dim = config.index_n_heads, config.index_head_dim
        self.topk = config.index_topk
        self.block_size = config.candidate_block_size
        self.topk_blocks = config.candidate_topk_blocks
        self.makes_candidates = layer == config.candidate_source_layer_id
        self.wq_b = params.linear(f"{prefix}.wq_b")
        self.weights_proj = params.linear(f"{prefix}.weights_proj")

    def select(
        self,
        u: Tensor,
        qr: Tensor,
        step: StepRows,
        keys: RecordField,
        ratio: int,
        chosen: Selection,
    ) -> None:
        """Publish this layer's selection, and candidates if it is their source."""
        rows, visible = step.rows, step.visible[ratio]
        most = rows.max_len // ratio
        restricts = most > self.topk_blocks * self.block_size
        if self.makes_candidates and not restricts:
            chosen.candidates = None
        needs_candidates = self.makes_candidates and restricts
        if most <= self.topk and chosen.candidates is None and not needs_candidates:
            # Every visible entry is selected, whatever its score.
            span = torch.arange(most, device=u.device).expand(len(rows.pos), -1)
            chosen.entries = span.masked_fill(span >= visible.unsqueeze(1), -1)
            return
        q = ops.linear(qr, self.wq_b).unflatten(1, (self.num_heads, self.dim))
        prepare = ops.rotate if keys.scales is None else ops.prepare_index_query
        q = prepare(q, *step.yarn)
        weights = ops.linear(u, self.weights_proj) * (self.dim**-0.5 * self.num_heads**-0.5)
        if chosen.candidates is not None and not self.makes_candidates:
            scores = ops.candidate_logits(
                q,
                weights,
                keys,
                rows.page_table,
                rows.req_of_row,
                chosen.candidates,
                visible,
                block_size=self.block_size,
                exact_rounding=self.exact_rounding,
            )
            chosen.entries = ops.select_from_candidates(
                scores, chosen.candidates, self.topk, block_size=self.block_size
            )
            return
        entries, blocks = [], []
        at_once = rows_of_scores(most)
        for first in range(0, len(visible), at_once):
            part = slice(first, first + at_once)
            scores = ops.index_logits(
                q[part],
                weights[part],
                keys,
                rows.page_table,
                rows.req_of_row[part],
                visible[part],
                most,
                exact_rounding=self.exact_rounding,
            )
            entries.append(ops.select_top_k(scores, self.topk, visible[part]))
            if needs_candidates:
                blocks.append(
                    ops.select_candidate_blocks(
                        scores,
                        visible[part],
                        block_size=self.block_size,
                        topk_blocks=self.topk_blocks,
                    )
                )
        chosen.entries = _joined(entries)
        if needs_candidates:
            chosen.candidates = _joined(blocks)


def _joined(parts: list[Tensor]) -> Tensor:
    """Rows of all parts; of one part itself, not a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Attention:
    """``attn`` of a block, in two halves: ``write`` fills caches, ``read`` attends.

    Both begin with a product of the same input. It is one product but at the cut, where few of the
    rows that write also read. In either half ``beside`` has what only meets the rest at its end:
    entries and keys beside windows, the selection of entries beside the queries that attend.
    """

    def __init__(
        self,
        params: Parameters,
        prefix: str,
        config: ModelConfig,
        layer: int,
        exact_rounding: bool,
        *,
        beside: SideStream,
    ) -> None:
        d = config.head_dim
        self.beside = beside
        self.layer, self.head_dim, self.eps = layer, d, config.rms_norm_eps
        self.exact_rounding = exact_rounding
        self.ratio = config.compress_ratios[layer]
        self.kv_source = config.kv_source(layer)
        heads = params.placement.shard(config.num_attention_heads, "num_attention_heads")
        groups = params.placement.shard(config.o_groups, "o_groups")
        rank = config.o_lora_rank
        self.down: Weight | None = None
        if layer == config.cut:
            self.wq_a = params.linear(f"{prefix}.wq_a")
            self.wkv = params.linear(f"{prefix}.wkv")
        else:
            self.down = params.stacked_linear(f"{prefix}.wq_a", f"{prefix}.wkv")
        self.q_norm = params.tensor(f"{prefix}.q_norm.weight")
        self.wq_b = params.linear(f"{prefix}.wq_b", out=slice(heads.start * d, heads.stop * d))
        self.kv_norm = params.tensor(f"{prefix}.kv_norm.weight")
        self.sink = params.tensor(f"{prefix}.attn_sink", rows=heads)
        low_rank = slice(groups.start * rank, groups.stop * rank)
        self.wo_a = params.grouped_linear(
            f"{prefix}.wo_a", groups=groups.stop - groups.start, out=low_rank
        )
        self.wo_b = params.linear(f"{prefix}.wo_b", inp=low_rank)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if layer in config.kv_source_layer_ids:
            self.compressor = Compressor(params, prefix, config, self.ratio)
        if layer in config.index_source_layer_ids:
            self.indexer = Indexer(params, f"{prefix}.indexer", config, layer, exact_rounding)

    def write(self, u: Tensor, step: StepRows, cache: CacheFields) -> Tensor | None:
        """Store window rows, entries and keys of ``u [r, D]``.

        Returns:
            ``[r, q_lora_rank]``, what queries are made of; None at the cut.
        """
        plan, compressing = step.window, None
        if self.compressor is not None:
            layer, open_groups = self.layer, cache.open_groups.get(self.layer)
            fields = cache.kv[layer], cache.index[layer], open_groups
            compressing = self.beside.fork(
                partial(self.compressor.write, u, step, *fields), num_rows=len(u)
            )
        place = (*self._angles(step), cache.window[self.layer], plan.outer, plan.inner)
        qr = None
        if self.down is None:
            ops.norm_rotate_store(ops.linear(u, self.wkv), self.kv_norm, *place, eps=self.eps)
        else:
            down = ops.linear(u, self.down)
            qr = ops.norm_query_store_window(down, self.q_norm, self.kv_norm, *place, eps=self.eps)
        if compressing is not None:
            compressing.join()
        return qr

    def read(
        self,
        u: Tensor,
        qr: Tensor | None,
        step: StepRows,
        cache: CacheFields,
        chosen: Selection,
    ) -> Tensor:
        """Attend with the rows ``u [r, D]`` over their windows and the selected entries.

        Args:
            u: as ``write`` got it, or some rows of that at the cut.
            qr: what ``write`` returned.
            step: of these rows.
            cache: that ``write`` has filled.
            chosen: of the half so far.
        """
        if qr is None:
            qr = ops.rms_norm(ops.linear(u, self.wq_a), self.q_norm, eps=self.eps)
        kv = selecting = None
        if self.kv_source is not None:
            kv = cache.kv[self.kv_source]
            if self.indexer is not None:
                keys = cache.index[self.kv_source]
                select = partial(self.indexer.select, u, qr, step, keys, self.ratio, chosen)
                selecting = self.beside.fork(select, num_rows=len(u))
        q = ops.linear(qr, self.wq_b).unflatten(1, (-1, self.head_dim))
        if selecting is not None:
            selecting.join()
        out = ops.sparse_attention(
            q,
            *self._angles(step),
            cache.window[self.layer],
            step.window.index,
            step.window.width,
            kv,
            step.rows.page_table,
            step.rows.req_of_row,
            chosen.entries if kv is not None else None,
            self.sink,
            exact_rounding=self.exact_rounding,
        )
        self.commit(step, cache)
        return ops.output_projection(out, self.wo_a, self.wo_b)

    def commit(self, step: StepRows, cache: CacheFields) -> None:
        """Bring window rows that were staged to the rings, now that they have been read."""
        plan, rows = step.window, step.rows
        if plan.stages:
            ops.commit_window(
                cache.window[self.layer],
                plan.q_off,
                rows.seq_len,
                rows.slot,
                window=plan.window,
                staging=plan.staging,
            )

    def _angles(self, step: StepRows) -> tuple[Tensor, Tensor]:
        return step.yarn if self.ratio else step.plain
