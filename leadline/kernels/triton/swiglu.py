"""SwiGLU between the products of an expert (v41-model 5.3)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clamped_swiglu(gate, up, limit):
    """``silu(gate) up`` of float32 tiles, the gate clamped from above only; NaN stays."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate * tl.sigmoid(gate) * up
