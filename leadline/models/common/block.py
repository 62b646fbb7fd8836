"""What a transformer block of either model has around its attention."""

from __future__ import annotations

from leadline.config.families import AnyConfig
from leadline.models.common.mhc import MixSite
from leadline.models.common.moe import MoE
from leadline.models.common.parameters import Parameters
from leadline.models.common.side_stream import SideStreams


class BlockParts:
    """Norms, sites where streams are mixed, and experts; attention is each model's own.

    Attributes:
        layer: number of the block.
        eps: of its norms.
    """

    def __init__(
        self,
        params: Parameters,
        layer: int,
        config: AnyConfig,
        *,
        beside: SideStreams,
        hashed: bool = False,
    ) -> None:
        """Fetch the weights.

        Args:
            params: where they come from.
            layer: number of the block.
            config: the model.
            beside: of the parts whose work may run beside the rest.
            hashed: tokens say which experts they want.
        """
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
        self.ffn = MoE(
            params,
            f"{prefix}.ffn",
            n_routed_experts=config.n_routed_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            routed_scaling_factor=config.routed_scaling_factor,
            swiglu_limit=config.swiglu_limit,
            beside=beside,
            hashed=hashed,
        )
