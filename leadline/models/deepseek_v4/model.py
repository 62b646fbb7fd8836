"""The forward pass of DeepSeek-V4. Start here.

There is no cut: every layer has a compressed cache of its own and must see every token, so
``lower`` is all of the blocks, and ``upper`` makes one row of the streams (v4-model 2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from leadline.config.v4 import V4Config
from leadline.kernels import ops
from leadline.models.batch import CacheFields, ForwardBatch
from leadline.models.common.attention import StepRows
from leadline.models.common.backbone import Backbone
from leadline.models.common.block import BlockParts
from leadline.models.common.layers import at_layer
from leadline.models.common.mhc import MixSite
from leadline.models.common.parameters import Parameters
from leadline.models.common.rows import Rows, plan_window
from leadline.models.common.side_stream import FEWER_ROWS, SideStreams, make_side_streams
from leadline.models.deepseek_v4.attention import Attention


class Block(BlockParts):
    """One transformer block."""

    def __init__(
        self,
        params: Parameters,
        layer: int,
        config: V4Config,
        exact_rounding: bool,
        *,
        beside: SideStreams,
    ) -> None:
        super().__init__(
            params, layer, config, beside=beside, hashed=layer < config.num_hash_layers
        )
        self.attn = Attention(
            params, f"layers.{layer}.attn", config, layer, exact_rounding, beside=beside
        )

    def forward(self, x: Tensor, token_ids: Tensor, step: StepRows, cache: CacheFields) -> Tensor:
        """Streams ``[r, S, D]`` behind the block."""

        def attend(u: Tensor) -> Tensor:
            qr = self.attn.write(u, step, cache)
            assert qr is not None
            return self.attn.read(u, qr, step, cache)

        def feed(u: Tensor) -> Tensor:
            return self.ffn.forward(u, step.rows.req_of_row, token_ids)

        x = self._around(attend, x, self.hc_attn, self.attn_norm)
        return self._around(feed, x, self.hc_ffn, self.ffn_norm)

    def _around(
        self, sublayer: Callable[[Tensor], Tensor], x: Tensor, site: MixSite, norm: Tensor
    ) -> Tensor:
        """A sublayer between streams; all of a site's coefficients are used at that site (2.1)."""
        pre, post, comb = site.coefficients(x)
        y = sublayer(ops.mhc_enter(x, pre, norm, eps=self.eps))
        return ops.mhc_expand(y, x, post, comb)


class DeepseekV4(Backbone):
    """The text model; implements ``models.batch.Model``."""

    def __init__(
        self,
        config: V4Config,
        params: Parameters,
        *,
        exact_rounding: bool = True,
        side_streams: str = "all",
    ) -> None:
        """Build every module from the parameters' weight source.

        Args:
            config: the model.
            params: where weights come from, and their dtypes.
            exact_rounding: bf16 only, see ``ops.sparse_attention``.
            side_streams: parts that run beside what does not wait for them, in steps of few rows;
                see ``make_side_streams``.

        Raises:
            ConfigError: there is no such part.
        """
        beside = make_side_streams(
            side_streams, params.device, {("compressor", "indexer", "shared_expert"): FEWER_ROWS}
        )
        super().__init__(config, params)
        self.config = config
        self.blocks = [
            Block(params, layer, config, exact_rounding, beside=beside)
            for layer in range(config.num_hidden_layers)
        ]
        self.hc_head_fn = params.tensor("hc_head_fn")
        self.hc_head_base = params.tensor("hc_head_base")
        self.hc_head_scale = params.tensor("hc_head_scale")

    @property
    def obstacle_to_graphs(self) -> str | None:
        """What of the weights a graph cannot hold, or None."""
        return self.blocks[0].ffn.obstacle_to_graphs

    def lower(self, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """Every row through every block: the streams ``[m, S, D]``."""
        rows = Rows.of(batch, batch.pos, batch.req_of_row, batch.q_off)
        window = plan_window(
            rows,
            batch.floor_lo,
            batch.q_off,
            max_rows=batch.max_rows,
            window=self.config.sliding_window,
            cache=self.cache,
        )
        # The window always takes all of its slots, so that entries begin a block (3.7).
        width = torch.full_like(window.width, self.config.sliding_window)
        window = dataclasses.replace(window, width=width)
        step = StepRows.of(rows, window, self.rotary, [block.attn for block in self.blocks])
        x = self.embed[batch.ids].unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        for block in self.blocks:
            with at_layer(block.layer):
                x = block.forward(x, batch.ids, step, self.cache)
        return (x,)

    def upper(self, state: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """The last streams as one row: ``[u, D]`` after the final norm (2.2)."""
        (x,) = state
        mix = ops.mhc_head(
            x,
            self.hc_head_fn,
            self.hc_head_base,
            self.hc_head_scale,
            hc_eps=self.config.hc_eps,
            eps=self.config.rms_norm_eps,
        )
        return ops.mhc_enter(x, mix, self.norm, eps=self.config.rms_norm_eps)
