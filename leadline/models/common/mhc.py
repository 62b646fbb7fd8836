"""One hyper-connection site: the parameters that mix the streams around a sublayer."""

from __future__ import annotations

from torch import Tensor

from leadline.kernels import ops
from leadline.models.common.parameters import Parameters


class MixSite:
    """``hc_attn_*`` or ``hc_ffn_*`` of a block (v41-model 2.3)."""

    def __init__(
        self, params: Parameters, prefix: str, *, sinkhorn_iters: int, hc_eps: float, eps: float
    ) -> None:
        self.fn = params.tensor(f"{prefix}_fn")
        self.base = params.tensor(f"{prefix}_base")
        self.scale = params.tensor(f"{prefix}_scale")
        self.sinkhorn_iters, self.hc_eps, self.eps = sinkhorn_iters, hc_eps, eps

    def coefficients(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``pre [m, S]``, ``post [m, S]``, ``comb [m, S, S]`` of streams ``[m, S, D]``."""
        return ops.mhc_coefficients(
            streams,
            self.fn,
            self.base,
            self.scale,
            sinkhorn_iters=self.sinkhorn_iters,
            hc_eps=self.hc_eps,
            eps=self.eps,
        )
