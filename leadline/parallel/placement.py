"""Which rank holds which heads, groups, experts and vocabulary rows: integers only.

One rank for now; modules ask here for their shard, so that more ranks change no formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from leadline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """This rank's place among ``world`` tensor- and expert-parallel ranks."""

    rank: int = 0
    world: int = 1

    def shard(self, total: int, what: str) -> slice:
        """The contiguous part of ``total`` items that this rank holds.

        Raises:
            ConfigError: ``total`` does not divide by the number of ranks.
        """
        if total % self.world:
            raise ConfigError(f"{what} ({total}) cannot be split evenly over {self.world} ranks")
        each = total // self.world
        return slice(self.rank * each, (self.rank + 1) * each)
