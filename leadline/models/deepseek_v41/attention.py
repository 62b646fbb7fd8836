"""CSA2 attention: a private window, and entries of a shared compressed cache (v41-model 3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from leadline.config.model import ModelConfig
from leadline.kernels import ops
from leadline.kernels.packed import RecordField
from leadline.models.batch import CacheFields
from leadline.models.common.attention import LatentAttention, StepRows
from leadline.models.common.indexer import EntryScores, joined
from leadline.models.common.parameters import Parameters
from leadline.models.common.side_stream import SideStreams


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


class Compressor:
    """Makes the compressed entries and index keys of a KV source (3.3, 3.4)."""

    def __init__(self, params: Parameters, prefix: str, config: ModelConfig, layer: int) -> None:
        self.layer, self.ratio = layer, config.compress_ratios[layer]
        self.eps = config.rms_norm_eps
        self.norm = params.tensor(f"{prefix}.compressor.norm.weight")
        self.k_norm = params.tensor(f"{prefix}.indexer.k_norm.weight")
        self.wk = params.linear(f"{prefix}.indexer.wk").dense
        self.gated: Tensor | None = None
        if self.ratio == 1:
            self.wkv = params.linear(f"{prefix}.compressor.wkv")
        else:  # values and gates in one wide product
            names = (f"{prefix}.compressor.{part}.weight" for part in ("wkv", "wgate"))
            self.gated = params.wide_linear(*names)

    def write(self, u: Tensor, step: StepRows, cache: CacheFields) -> None:
        """See ``EntryWriter``."""
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
            cache.kv[self.layer],
            cache.open_groups.get(self.layer),
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
            cache.index[self.layer],
            ratio=self.ratio,
            eps=self.eps,
        )


class Indexer(EntryScores):
    """Scores entries and selects the best (3.5, 3.6)."""

    def __init__(
        self, params: Parameters, prefix: str, config: ModelConfig, layer: int, exact_rounding: bool
    ) -> None:
        super().__init__(params, prefix, config, exact_rounding)
        self.block_size = config.candidate_block_size
        self.topk_blocks = config.candidate_topk_blocks
        self.makes_candidates = layer == config.candidate_source_layer_id

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
        q, weights = self.query(u, qr, step, keys)
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
        for scores, counts in self.blocks(q, weights, step, keys, ratio):
            entries.append(ops.select_top_k(scores, self.topk, counts))
            if needs_candidates:
                blocks.append(
                    ops.select_candidate_blocks(
                        scores, counts, block_size=self.block_size, topk_blocks=self.topk_blocks
                    )
                )
        chosen.entries = joined(entries)
        if needs_candidates:
            chosen.candidates = joined(blocks)


class Attention(LatentAttention):
    """``attn`` of a block, in two halves: ``write`` fills caches, ``read`` attends.

    Both begin with a product of the same input. It is one product but at the cut, where few of the
    rows that write also read.
    """

    def __init__(
        self,
        params: Parameters,
        prefix: str,
        config: ModelConfig,
        layer: int,
        exact_rounding: bool,
        *,
        beside: SideStreams,
    ) -> None:
        at_cut = layer == config.cut
        super().__init__(params, prefix, config, layer, exact_rounding, beside=beside, split=at_cut)
        self.kv_source = config.kv_source(layer)
        self.indexer: Indexer | None = None
        if layer in config.kv_source_layer_ids:
            self.compressor = Compressor(params, prefix, config, layer)
        if layer in config.index_source_layer_ids:
            self.indexer = Indexer(params, f"{prefix}.indexer", config, layer, exact_rounding)
            self.counts_entries = True

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
                selecting = self.beside["indexer"].fork(select, num_rows=len(u))
        q = ops.linear(qr, self.wq_b).unflatten(1, (-1, self.head_dim))
        if selecting is not None:
            selecting.join()
        return self.attend(q, step, cache, kv, chosen.entries if kv is not None else None)
