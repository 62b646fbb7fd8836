"""The forward pass of DeepSeek-V4.1. Start here.

``lower`` runs every row through the layers before the cut and makes the cut layer's caches;
``upper`` runs the rows that need it through the rest. The cut lies inside the last KV source
(layer 20 of V4.1-Flash): everything above reads that layer's compressed cache (v41-model 2.4, 5.5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from leadline.config.model import ModelConfig
from leadline.kernels import ops
from leadline.models.batch import CacheFields, ForwardBatch
from leadline.models.common.attention import StepRows
from leadline.models.common.backbone import Backbone
from leadline.models.common.block import BlockParts
from leadline.models.common.layers import at_layer
from leadline.models.common.parameters import Parameters
from leadline.models.common.rows import Rows, WindowPlan, plan_window
from leadline.models.common.side_stream import FEW_ROWS, FEWER_ROWS, SideStreams, make_side_streams
from leadline.models.deepseek_v41.attention import Attention, Selection
from leadline.models.deepseek_v41.engram import Engram, EngramHash, EngramPrefetch, NgramValues


@dataclass(frozen=True, slots=True)
class Update:
    """A sublayer's output ``y [r, D]``, and the coefficients that mix it into the streams."""

    y: Tensor
    post: Tensor
    comb: Tensor


@dataclass(frozen=True, slots=True)
class Streams:
    """The residual streams between two sublayers, in two parts that one operation puts together.

    Attributes:
        before: ``[r, S, D]`` activations, the streams in front of the last sublayer.
        carry: ``[r, S]`` wide, the collapse weights of the next one.
        update: what the last one does to them; None before the first.
    """

    before: Tensor
    carry: Tensor
    update: Update | None = None

    @property
    def x(self) -> Tensor:
        """``[r, S, D]``, put together."""
        if self.update is None:
            return self.before
        return ops.mhc_expand(self.update.y, self.before, self.update.post, self.update.comb)

    def enter(self, norm: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        """``x``, and the next sublayer's input ``u [r, D]``."""
        if self.update is None:
            return self.before, ops.mhc_enter(self.before, self.carry, norm, eps=eps)
        y, post, comb = self.update.y, self.update.post, self.update.comb
        return ops.mhc_seam(y, self.before, post, comb, self.carry, norm, eps=eps)


class Block(BlockParts):
    """One transformer block, cut between filling its caches and attending."""

    def __init__(
        self,
        params: Parameters,
        layer: int,
        config: ModelConfig,
        exact_rounding: bool,
        *,
        beside: SideStreams,
    ) -> None:
        super().__init__(params, layer, config, beside=beside)
        self.mixing = beside["mixing"]
        self.attn = Attention(
            params, f"layers.{layer}.attn", config, layer, exact_rounding, beside=beside
        )
        self.engram: Engram | None = None
        if layer in config.engram_layer_ids:
            self.engram = Engram(params, f"layers.{layer}.engram", config)
            self.engram_index = config.engram_layer_ids.index(layer)

    def begin(
        self, streams: Streams, ngrams: NgramValues | None, step: StepRows, cache: CacheFields
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Up to the caches: ``x [r, S, D]``, ``u [r, D]``, and ``qr`` of ``Attention.write``."""
        if self.engram is not None and ngrams is not None:
            x = self.engram.inject(streams.x, *ngrams.wait(self.engram_index))
            streams = Streams(x, streams.carry)
        x, u = streams.enter(self.attn_norm, eps=self.eps)
        return x, u, self.attn.write(u, step, cache)

    def finish(
        self,
        x: Tensor,
        u: Tensor,
        qr: Tensor | None,
        step: StepRows,
        cache: CacheFields,
        chosen: Selection,
    ) -> Streams:
        """Attention, then the experts; each site's ``pre`` is used one site later.

        What mixes a sublayer's output into the streams is wanted after it, and made beside it.
        """
        mixing = self.mixing.fork(partial(self.hc_attn.coefficients, x), num_rows=len(x))
        y = self.attn.read(u, qr, step, cache, chosen)
        pre, post, comb = mixing.join()
        x, u = Streams(x, pre, Update(y, post, comb)).enter(self.ffn_norm, eps=self.eps)
        mixing = self.mixing.fork(partial(self.hc_ffn.coefficients, x), num_rows=len(x))
        y = self.ffn.forward(u, step.rows.req_of_row)
        carry, post, comb = mixing.join()
        return Streams(x, carry, Update(y, post, comb))


class DeepseekV41(Backbone):
    """The text model; implements ``models.batch.Model``."""

    def __init__(
        self,
        config: ModelConfig,
        params: Parameters,
        *,
        token_map: Sequence[int] | None,
        exact_rounding: bool = True,
        side_streams: str = "all",
        engram_prefetch: bool = True,
    ) -> None:
        """Build every module from the parameters' weight source.

        Args:
            config: the model.
            params: where weights come from, and their dtypes.
            token_map: Engram class of each token id (``engram.compressed_token_map``), or None.
            exact_rounding: bf16 only, see ``ops.sparse_attention``.
            side_streams: parts that run beside what does not wait for them, in steps of few rows;
                see ``make_side_streams``.
            engram_prefetch: Engram rows are gathered beside the layers in front of them.

        Raises:
            ConfigError: there is no such part.
        """
        device = params.device
        # Two, or coefficients would hold up selections and shared experts, which layers wait for.
        beside = make_side_streams(
            side_streams,
            device,
            {("mixing",): FEW_ROWS, ("compressor", "indexer", "shared_expert"): FEWER_ROWS},
        )
        super().__init__(config, params)
        self.config = config
        self.num_history = config.engram_max_ngram_size - 1
        self.blocks = [
            Block(params, layer, config, exact_rounding, beside=beside)
            for layer in range(config.num_hidden_layers)
        ]
        self.prefetch: EngramPrefetch | None = None
        if config.engram_layer_ids:
            tables = [block.engram.table for block in self.blocks if block.engram is not None]
            engram_hash = EngramHash(config, token_map, device)
            self.prefetch = EngramPrefetch(engram_hash, tables, device, enabled=engram_prefetch)
        # Of Engram layers: places among them of those above the cut.
        self.engrams_above = [
            i for i, layer in enumerate(config.engram_layer_ids) if layer > config.cut
        ]

    @property
    def obstacle_to_graphs(self) -> str | None:
        """What of the weights a graph cannot hold, or None."""
        for block in self.blocks:
            if block.engram is not None and block.engram.table.waits_for_host:
                return "the host gathers rows of Engram tables"
            if block.ffn.obstacle_to_graphs is not None:
                return block.ffn.obstacle_to_graphs
        return None

    def lower(self, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """Every row, up to and including the cut layer's caches.

        Returns:
            For each row the streams ``[m, S, D]`` in front of the cut layer's attention and its
            normalised input ``[m, D]``; with Engram layers above, their ``NgramValues`` too.
        """
        ngrams = None if self.prefetch is None else self.prefetch.start(batch)
        blocks = self.blocks[: self.config.cut + 1]
        rows = Rows.of(batch, batch.pos, batch.req_of_row, batch.q_off)
        step = self._step(batch, rows, batch.floor_lo, blocks)
        x = self.embed[batch.ids].unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        carry = torch.zeros(x.shape[:2], dtype=self.wide, device=x.device)
        carry[:, 0].fill_(1.0)  # layer 0 attends with the embedding itself
        streams, chosen = Streams(x, carry), Selection()
        *below, cut = blocks
        for block in below:
            streams = self._run(block, streams, ngrams, step, chosen)
        with at_layer(cut.layer):
            x, u, _ = cut.begin(streams, ngrams, step, self.cache)
        if ngrams is None or not self.engrams_above:
            return x, u
        return x, u, *ngrams.tensors(self.engrams_above)

    def upper(self, state: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """The rest for ``batch.rows_upper``: ``[u, D]`` after the final norm."""
        x, u, *of_ngrams = state
        ngrams = NgramValues.of(self.engrams_above, *of_ngrams) if of_ngrams else None
        blocks = self.blocks[self.config.cut :]
        pos = batch.pos[batch.rows_upper]
        rows = Rows.of(batch, pos, batch.req_of_upper, batch.upper_off)
        above = self._step(batch, rows, batch.floor_up, blocks)
        # The cut layer sees the rows that ``lower`` stored, and its windows reach down to s.
        window = self._plan_window(batch, rows, batch.floor_lo, batch.q_off)
        at_cut = dataclasses.replace(above, window=window)
        cut, *rest = blocks
        if not len(pos):
            cut.attn.commit(at_cut, self.cache)
            return u
        chosen = Selection()
        with at_layer(cut.layer):
            streams = cut.finish(x, u, None, at_cut, self.cache, chosen)
        for block in rest:
            streams = self._run(block, streams, ngrams, above, chosen)
        _, hidden = streams.enter(self.norm, eps=self.config.rms_norm_eps)
        return hidden

    def _run(
        self,
        block: Block,
        streams: Streams,
        ngrams: NgramValues | None,
        step: StepRows,
        chosen: Selection,
    ) -> Streams:
        with at_layer(block.layer):
            x, u, qr = block.begin(streams, ngrams, step, self.cache)
            return block.finish(x, u, qr, step, self.cache, chosen)

    def _step(
        self, batch: ForwardBatch, rows: Rows, floor: Tensor, blocks: Sequence[Block]
    ) -> StepRows:
        """What attention of these blocks needs to know of their rows."""
        window = self._plan_window(batch, rows, floor, rows.q_off)
        return StepRows.of(rows, window, self.rotary, [block.attn for block in blocks])

    def _plan_window(
        self, batch: ForwardBatch, rows: Rows, floor: Tensor, stored: Tensor
    ) -> WindowPlan:
        return plan_window(
            rows,
            floor,
            stored,
            max_rows=batch.max_rows,
            window=self.config.sliding_window,
            cache=self.cache,
        )
