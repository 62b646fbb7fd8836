"""The forward pass of DeepSeek-V4.1. Start here.

``lower`` runs every row through the layers before the cut and makes the cut layer's caches;
``upper`` runs the rows that need it through the rest. The cut lies inside the last KV source
(layer 20 of V4.1-Flash): everything above reads that layer's compressed cache (v41-model 2.4, 5.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.config.model import ModelConfig
from leadline.kernels import ops
from leadline.kernels.debug import NonFiniteError
from leadline.kernels.packed import RecordField
from leadline.kernels.reference.rope import rope_frequencies, yarn_frequencies
from leadline.models.batch import CacheFields, ForwardBatch
from leadline.models.common.mhc import MixSite
from leadline.models.common.moe import MoE
from leadline.models.common.parameters import Parameters
from leadline.models.common.rows import Rows, WindowPlan, plan_window
from leadline.models.deepseek_v41.attention import Attention, Selection, StepRows
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


@dataclass(frozen=True, slots=True)
class LowerState:
    """What ``lower`` hands to ``upper``, for every row of the step.

    Attributes:
        x: ``[m, S, D]`` the streams in front of the cut layer's attention.
        u: ``[m, D]`` its normalised input.
        window: its window workspace.
    """

    x: Tensor
    u: Tensor
    window: RecordField
    step: StepRows
    ngrams: NgramValues | None


class Block:
    """One transformer block, cut between filling its caches and attending."""

    def __init__(
        self, params: Parameters, layer: int, config: ModelConfig, exact_rounding: bool
    ) -> None:
        prefix, eps = f"layers.{layer}", config.rms_norm_eps
        self.layer, self.eps = layer, eps
        self.attn_norm = params.tensor(f"{prefix}.attn_norm.weight")
        self.ffn_norm = params.tensor(f"{prefix}.ffn_norm.weight")
        self.hc_attn, self.hc_ffn = (
            MixSite(
                params,
                f"{prefix}.hc_{site}",
                sinkhorn_iters=config.hc_sinkhorn_iters,
                hc_eps=config.hc_eps,
                eps=eps,
            )
            for site in ("attn", "ffn")
        )
        self.attn = Attention(params, f"{prefix}.attn", config, layer, exact_rounding)
        self.ffn = MoE(
            params,
            f"{prefix}.ffn",
            n_routed_experts=config.n_routed_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            routed_scaling_factor=config.routed_scaling_factor,
            swiglu_limit=config.swiglu_limit,
        )
        self.engram: Engram | None = None
        if layer in config.engram_layer_ids:
            self.engram = Engram(params, f"{prefix}.engram", config)
            self.engram_index = config.engram_layer_ids.index(layer)

    def begin(
        self, streams: Streams, ngrams: NgramValues | None, step: StepRows, cache: CacheFields
    ) -> tuple[Tensor, Tensor, RecordField]:
        """Up to the caches: ``x [r, S, D]``, ``u [r, D]``, window workspace."""
        if self.engram is not None and ngrams is not None:
            x = self.engram.inject(streams.x, *ngrams.wait(self.engram_index))
            streams = Streams(x, streams.carry)
        x, u = streams.enter(self.attn_norm, eps=self.eps)
        return x, u, self.attn.write(u, step, cache)

    def finish(
        self,
        x: Tensor,
        u: Tensor,
        window: RecordField,
        step: StepRows,
        cache: CacheFields,
        chosen: Selection,
    ) -> Streams:
        """Attention, then the experts; each site's ``pre`` is used one site later."""
        pre, post, comb = self.hc_attn.coefficients(x)
        y = self.attn.read(u, window, step, cache, chosen)
        x, u = Streams(x, pre, Update(y, post, comb)).enter(self.ffn_norm, eps=self.eps)
        carry, post, comb = self.hc_ffn.coefficients(x)
        return Streams(x, carry, Update(self.ffn.forward(u), post, comb))


class DeepseekV41:
    """The text model; implements ``models.batch.Model``."""

    def __init__(
        self,
        config: ModelConfig,
        params: Parameters,
        *,
        token_map: Sequence[int] | None,
        exact_rounding: bool = True,
    ) -> None:
        """Build every module from the parameters' weight source.

        Args:
            config: the model.
            params: where weights come from, and their dtypes.
            token_map: Engram class of each token id (``engram.compressed_token_map``), or None.
            exact_rounding: bf16 only, see ``ops.sparse_attention``.
        """
        self.config = config
        device = params.device
        self.wide = params.wide
        self.embed = params.embedding("embed.weight")
        rope_dim, scaling = config.qk_rope_head_dim, config.rope_scaling
        self.plain_frequencies = rope_frequencies(rope_dim, config.rope_theta).to(device)
        self.yarn_frequencies = yarn_frequencies(
            rope_dim,
            config.compress_rope_theta,
            factor=scaling.factor,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
        ).to(device)
        self.blocks = [
            Block(params, layer, config, exact_rounding)
            for layer in range(config.num_hidden_layers)
        ]
        self.prefetch: EngramPrefetch | None = None
        if config.engram_layer_ids:
            tables = [block.engram.table for block in self.blocks if block.engram is not None]
            engram_hash = EngramHash(config, token_map, device)
            self.prefetch = EngramPrefetch(engram_hash, tables, device)
        self.norm = params.tensor("norm.weight")
        vocabulary = params.placement.shard(config.vocab_size, "vocab_size")
        self.head = params.wide_linear("head.weight", rows=vocabulary)
        self.ratios = {config.compress_ratios[source] for source in config.kv_source_layer_ids}
        self._cache: CacheFields | None = None

    def bind_cache(self, cache: CacheFields) -> None:
        """Take the cache that was sized after the weights were loaded."""
        self._cache = cache

    @property
    def cache(self) -> CacheFields:
        """The bound cache."""
        assert self._cache is not None, "bind_cache comes before the first step"
        return self._cache

    def lower(self, batch: ForwardBatch) -> LowerState:
        """Every row, up to and including the cut layer's caches."""
        ngrams = None if self.prefetch is None else self.prefetch.start(batch)
        step = self._lower_step(batch)
        x = self.embed[batch.ids].unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        carry = torch.zeros(x.shape[:2], dtype=self.wide, device=x.device)
        carry[:, 0] = 1.0  # layer 0 attends with the embedding itself
        streams, chosen = Streams(x, carry), Selection()
        for block in self.blocks[: self.config.cut]:
            streams = self._run(block, streams, ngrams, step, chosen)
        cut = self.blocks[self.config.cut]
        with _at_layer(cut.layer):
            x, u, window = cut.begin(streams, ngrams, step, self.cache)
        return LowerState(x, u, window, step, ngrams)

    def upper(self, state: LowerState, batch: ForwardBatch) -> Tensor:
        """The rest for ``batch.rows_upper``: ``[u, D]`` after the final norm."""
        kept = batch.rows_upper
        at_cut, above = self._upper_steps(state.step, batch)
        ngrams = state.ngrams and state.ngrams.take(kept)
        chosen = Selection()
        cut, *rest = self.blocks[self.config.cut :]
        with _at_layer(cut.layer):
            x, u = state.x[kept], state.u[kept]
            streams = cut.finish(x, u, state.window, at_cut, self.cache, chosen)
        for block in rest:
            streams = self._run(block, streams, ngrams, above, chosen)
        _, hidden = streams.enter(self.norm, eps=self.config.rms_norm_eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """``[v, D]`` -> wide logits ``[v, V]``."""
        return ops.wide_linear(hidden, self.head)

    def _run(
        self,
        block: Block,
        streams: Streams,
        ngrams: NgramValues | None,
        step: StepRows,
        chosen: Selection,
    ) -> Streams:
        with _at_layer(block.layer):
            x, u, window = block.begin(streams, ngrams, step, self.cache)
            return block.finish(x, u, window, step, self.cache, chosen)

    def _lower_step(self, batch: ForwardBatch) -> StepRows:
        rows = Rows(
            pos=batch.pos,
            req_of_row=batch.req_of_row.long(),
            q_off=batch.q_off.long(),
            slot=batch.slot.long(),
            seq_len=batch.seq_len.long(),
            write_from=batch.write_from.long(),
            page_table=batch.page_table.long(),
        )
        return StepRows(
            rows=rows,
            window=self._plan_window(rows, batch.floor_lo),
            plain=ops.rope_angles(rows.pos, self.plain_frequencies),
            yarn=ops.rope_angles(rows.pos, self.yarn_frequencies),
            entry_angles={
                ratio: ops.rope_angles(rows.pos - (ratio - 1), self.yarn_frequencies)
                for ratio in self.ratios
            },
        )

    def _upper_steps(self, lower: StepRows, batch: ForwardBatch) -> tuple[StepRows, StepRows]:
        """The upper rows as the cut layer sees them (window down to s), and the layers above."""
        kept = batch.rows_upper
        if len(kept) == len(batch.ids) and self._floors_agree(batch):
            return lower, lower
        rows = lower.rows.take(kept)
        plain = (lower.plain[0][kept], lower.plain[1][kept])
        yarn = (lower.yarn[0][kept], lower.yarn[1][kept])
        at_cut = StepRows(rows, lower.window.take(kept), plain, yarn)
        return at_cut, StepRows(rows, self._plan_window(rows, batch.floor_up), plain, yarn)

    def _floors_agree(self, batch: ForwardBatch) -> bool:
        """Whether both halves see the same windows, as they do once decoding has filled them."""
        oldest = batch.pos - self.config.sliding_window + 1
        reached = oldest >= batch.floor_up[batch.req_of_row]  # U is never below s
        return torch.equal(batch.floor_lo, batch.floor_up) or bool(reached.all())

    def _plan_window(self, rows: Rows, floor: Tensor) -> WindowPlan:
        ring = self.cache.window[0].values.shape[1]
        window = self.config.sliding_window
        return plan_window(rows, floor.long(), window=window, ring=ring)


class _at_layer:
    """Adds the layer to a ``NonFiniteError`` on its way up."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NonFiniteError):
            raise NonFiniteError(error.op, error.row, self.layer) from error
