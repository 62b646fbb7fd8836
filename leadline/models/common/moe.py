"""Mixture of experts: a router, routed experts, one shared expert."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from leadline.kernels import ops
from leadline.kernels.packed import LinearWeight
from leadline.models.common.parameters import Parameters
from leadline.models.common.side_stream import SideStreams


class MoE:
    """``ffn`` of a block (v41-model 5; where the token says which experts, v4-model 5.1)."""

    def __init__(
        self,
        params: Parameters,
        prefix: str,
        *,
        n_routed_experts: int,
        num_experts_per_tok: int,
        routed_scaling_factor: float,
        swiglu_limit: float,
        beside: SideStreams,
        hashed: bool = False,
    ) -> None:
        self.beside = beside["shared_expert"]
        self.num_experts_per_tok = num_experts_per_tok
        self.routed_scaling_factor = routed_scaling_factor
        self.swiglu_limit = swiglu_limit
        self.row_scales = params.expert_row_scales
        local = params.placement.shard(n_routed_experts, "n_routed_experts")
        self.gate = params.linear(f"{prefix}.gate").dense
        self.experts_of_tokens: Tensor | None = None
        if hashed:
            self.experts_of_tokens = params.ids(f"{prefix}.gate.tid2eid")
        else:
            self.bias = params.tensor(f"{prefix}.gate.bias")
        self.w13, self.w2 = params.arrange_experts(
            params.experts(f"{prefix}.experts", "w1", "w3", experts=local),
            params.experts(f"{prefix}.experts", "w2", experts=local),
        )
        shared = f"{prefix}.shared_experts"
        self.shared_w13 = params.stacked_linear(f"{shared}.w1", f"{shared}.w3")
        self.shared_w2 = params.linear(f"{shared}.w2")

    @property
    def obstacle_to_graphs(self) -> str | None:
        """What of the weights a graph cannot hold, or None."""
        if isinstance(self.w13, LinearWeight):
            return "experts that are stored plain run by reference"
        return None

    def forward(self, x: Tensor, req_of_row: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """``[m, D]`` -> ``[m, D]``; the shared expert runs beside the others, and is added last.

        Padding, of group -1, chooses no expert, whose weights would be read for nobody. Layers that
        are ``hashed`` need the rows' token ids ``[m]``.
        """
        limit = self.swiglu_limit
        sharing = self.beside.fork(
            partial(ops.shared_expert, x, self.shared_w13, self.shared_w2, limit=limit),
            num_rows=len(x),
        )
        ids, weights = self._route(x, req_of_row, token_ids)
        return ops.routed_experts(
            x,
            ids,
            weights,
            self.w13,
            self.w2,
            limit=limit,
            row_scales=self.row_scales,
            shared=sharing.join,
        )

    def _route(
        self, x: Tensor, req_of_row: Tensor, token_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scale = self.routed_scaling_factor
        if self.experts_of_tokens is None:
            number = self.num_experts_per_tok
            return ops.route(
                x, self.gate, self.bias, req_of_row, num_experts_per_tok=number, scale=scale
            )
        assert token_ids is not None, "this layer's experts depend on token ids"
        return ops.hash_route(
            x, self.gate, self.experts_of_tokens, token_ids, req_of_row, scale=scale
        )
