"""Attention of V4: a private window, and entries of the layer's own cache (v4-model 3)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from leadline.config.v4 import V4Config, V4LayerMode
from leadline.kernels import ops
from leadline.kernels.packed import RecordField
from leadline.models.batch import CacheFields
from leadline.models.common.attention import LatentAttention, StepRows
from leadline.models.common.indexer import EntryScores, joined
from leadline.models.common.parameters import Parameters
from leadline.models.common.side_stream import SideStreams


class Pool:
    """Makes one row of every group of tokens: an entry, or an index key (3.3, 3.4).

    Attributes:
        names: of the two matrices whose products are pooled, values and gates.
        width: of these products.
    """

    def __init__(
        self, params: Parameters, prefix: str, ratio: int, eps: float, *, hadamard: bool = False
    ) -> None:
        self.names = (f"{prefix}.wkv.weight", f"{prefix}.wgate.weight")
        self.ape = params.tensor(f"{prefix}.ape")
        self.norm = params.tensor(f"{prefix}.norm.weight")
        self.width = 2 * self.ape.shape[1]
        self.overlaps = self.ape.shape[1] > len(self.norm)
        self.ratio, self.eps, self.hadamard = ratio, eps, hadamard

    def store(
        self,
        projected: Tensor,
        step: StepRows,
        field: RecordField,
        rings: Tensor,
        dtype: torch.dtype,
    ) -> None:
        """Store what the rows ``projected [r, width]`` complete, and the rows themselves."""
        rows = step.rows
        ops.store_entries(
            projected,
            self.norm,
            *step.entry_angles[self.ratio],
            rows.pos,
            rows.req_of_row,
            rows.q_off,
            rows.slot,
            rows.seq_len,
            rows.write_from,
            rows.page_table,
            field,
            rings,
            ratio=self.ratio,
            eps=self.eps,
            dtype=dtype,
            ape=self.ape,
            overlaps=self.overlaps,
            hadamard=self.hadamard and field.scales is not None,
        )


class Compressor:
    """Makes the entries of a layer, and their index keys where they are selected.

    Keys have a pool of their own; all that is pooled is one wide product.
    """

    def __init__(self, params: Parameters, prefix: str, config: V4Config, layer: int) -> None:
        self.layer = layer
        ratio, eps = config.compress_ratios[layer], config.rms_norm_eps
        self.pools = [Pool(params, f"{prefix}.compressor", ratio, eps)]
        if config.mode(layer) is V4LayerMode.SPARSE:
            keys = Pool(params, f"{prefix}.indexer.compressor", ratio, eps, hadamard=True)
            self.pools.append(keys)
        self.gated = params.wide_linear(*(name for pool in self.pools for name in pool.names))

    def write(self, u: Tensor, step: StepRows, cache: CacheFields) -> None:
        """See ``EntryWriter``."""
        layer = self.layer
        projected = ops.wide_linear(u, self.gated).split([pool.width for pool in self.pools], dim=1)
        fields = [(cache.kv[layer], cache.open_groups[layer])]
        if len(self.pools) > 1:
            fields.append((cache.index[layer], cache.open_index_groups[layer]))
        for pool, rows, (field, rings) in zip(self.pools, projected, fields, strict=True):
            pool.store(rows, step, field, rings, u.dtype)


class Indexer(EntryScores):
    """Selects the best entries (3.5)."""

    def select(
        self, u: Tensor, qr: Tensor, step: StepRows, keys: RecordField, ratio: int
    ) -> Tensor | None:
        """``[r, <= K]`` entries of each row, or None where those are all that it may see."""
        if step.rows.max_len // ratio <= self.topk:
            return None
        q, weights = self.query(u, qr, step, keys)
        blocks = self.blocks(q, weights, step, keys, ratio)
        return joined([ops.select_top_k(scores, self.topk, counts) for scores, counts in blocks])


class Attention(LatentAttention):
    """``attn`` of a block: ``write`` fills caches, ``read`` attends."""

    def __init__(
        self,
        params: Parameters,
        prefix: str,
        config: V4Config,
        layer: int,
        exact_rounding: bool,
        *,
        beside: SideStreams,
    ) -> None:
        super().__init__(params, prefix, config, layer, exact_rounding, beside=beside)
        self.head_norm = torch.ones(self.head_dim, dtype=params.wide, device=params.device)
        self.indexer: Indexer | None = None
        if self.ratio:
            self.compressor = Compressor(params, prefix, config, layer)
            self.counts_entries = True
        if config.mode(layer) is V4LayerMode.SPARSE:
            self.indexer = Indexer(
                params, f"{prefix}.indexer", config, exact_rounding, hadamard=True
            )

    def read(self, u: Tensor, qr: Tensor, step: StepRows, cache: CacheFields) -> Tensor:
        """Attend with the rows ``u [r, D]``: over their windows, and selected entries or all.

        Args:
            u: as ``write`` got it.
            qr: what ``write`` returned.
            step: of these rows.
            cache: that ``write`` has filled.
        """
        selecting = None
        if self.indexer is not None:
            keys = cache.index[self.layer]
            select = partial(self.indexer.select, u, qr, step, keys, self.ratio)
            selecting = self.beside["indexer"].fork(select, num_rows=len(u))
        # Every head has a norm of its own, without a weight (3.1).
        heads = ops.linear(qr, self.wq_b).view(-1, self.head_dim)
        q = ops.rms_norm(heads, self.head_norm, eps=self.eps).unflatten(0, (len(u), -1))
        if not self.ratio:
            return self.attend(q, step, cache, None, None)
        selected = None if selecting is None else selecting.join()
        visible = step.visible[self.ratio] if selected is None else None
        return self.attend(q, step, cache, cache.kv[self.layer], selected, visible)
