"""Logits to token ids, and how likely these were."""

from __future__ import annotations

from leadline.kernels.reference import sampling
from leadline.kernels.registry import op

# -inf and NaN logits are theirs to handle.
apply_bitmask = op(watched=False)(sampling.apply_bitmask)
apply_penalties = op(watched=False)(sampling.apply_penalties)
greedy = op(watched=False)(sampling.greedy)
logprobs = op(watched=False)(sampling.logprobs)
sample = op(watched=False)(sampling.sample)
counter_uniform = sampling.counter_uniform
