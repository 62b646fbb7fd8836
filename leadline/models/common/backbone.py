"""What both models have around their blocks."""

from __future__ import annotations

from torch import Tensor

from leadline.config.families import AnyConfig
from leadline.kernels import ops
from leadline.models.batch import CacheFields
from leadline.models.common.parameters import Parameters
from leadline.models.common.rotary import Rotary


class Backbone:
    """Embedding, final norm, vocabulary head, and the cache that blocks work on.

    Attributes:
        wide: dtype of sums.
        num_history: ids before a group's first row that ``ForwardBatch.hist`` must hold.
    """

    num_history = 0

    def __init__(self, config: AnyConfig, params: Parameters) -> None:
        self.wide = params.wide
        self.rotary = Rotary(config, params.device)
        self.embed = params.embedding("embed.weight")
        self.norm = params.tensor("norm.weight")
        vocabulary = params.placement.shard(config.vocab_size, "vocab_size")
        self.head = params.wide_linear("head.weight", rows=vocabulary)
        self._cache: CacheFields | None = None

    def bind_cache(self, cache: CacheFields | None) -> None:
        """Take the cache that was sized after the weights were loaded; None lets go of one."""
        self._cache = cache

    @property
    def cache(self) -> CacheFields:
        """The bound cache."""
        assert self._cache is not None, "bind_cache comes before the first step"
        return self._cache

    def logits(self, hidden: Tensor) -> Tensor:
        """``[v, D]`` -> wide logits ``[v, V]``."""
        return ops.wide_linear(hidden, self.head)
