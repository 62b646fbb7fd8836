"""Angles of a step's rows."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.config.families import AnyConfig
from leadline.kernels import ops
from leadline.kernels.reference.rope import rope_frequencies, yarn_frequencies


class Rotary:
    """Cos and sin ``[r, rope / 2]`` of positions (v41-model 3.2)."""

    def __init__(self, config: AnyConfig, device: torch.device) -> None:
        dim, scaling = config.qk_rope_head_dim, config.rope_scaling
        self._plain = rope_frequencies(dim, config.rope_theta).to(device)
        self._yarn = yarn_frequencies(
            dim,
            config.compress_rope_theta,
            factor=scaling.factor,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
        ).to(device)

    def plain(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Of layers that see their window only."""
        return ops.rope_angles(pos, self._plain)

    def yarn(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Of layers with a compressed cache."""
        return ops.rope_angles(pos, self._yarn)
