"""How many rows of a prompt a step takes, and where they end. No torch."""

from __future__ import annotations

from leadline.cache.manager import CacheManager
from leadline.cache.replay import ReplayPolicy, cut_chunk
from leadline.config.engine import SchedulerConfig
from leadline.core.request import Request, RequestState, SnapshotKind
from leadline.engine.plan import StepPlan
from leadline.engine.row_budget import RowBudget


class Chunks:
    """Cuts prompts by the budgets of a step, by replays and by snapshots; changes nothing."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheManager, policy: ReplayPolicy, budget: RowBudget
    ) -> None:
        self._config = config
        self._cache = cache
        self._policy = policy
        self._budget = budget

    def num_rows(self, plan: StepPlan, request: Request) -> int:
        """Rows of the request's next chunk that this step can take (5.3)."""
        room = self.room(plan)
        if self._config.long_prefill_threshold is not None:
            room = min(room, self._config.long_prefill_threshold)
        num_rows = cut_chunk(
            fed=request.fed,
            cached=request.cached,
            floor_up=request.floor_up,
            prefill_end=request.prefill_end,
            room=room,
            largest=self.largest,
        )
        due = min(self.snapshots_due(request), default=request.prefill_end)
        return min(num_rows, due - request.fed)

    def room(self, plan: StepPlan) -> int:
        """Prefill rows that still fit: within T, and within P_max beside decode rows (5.2)."""
        left = self._budget.rows - plan.num_rows
        if plan.num_rows > plan.num_prefill_rows:
            left = min(left, self._config.max_prefill_rows - plan.num_prefill_rows)
        return max(0, left)

    @property
    def largest(self) -> int:
        """Prefill rows that every step has room for, however many requests decode."""
        config, most = self._config, self._budget.rows
        threshold = config.long_prefill_threshold or most
        return min(config.max_prefill_rows, most - config.max_num_seqs, threshold)

    def snapshots_due(self, request: Request) -> dict[int, SnapshotKind]:
        """Boundaries above ``fed`` at which the slot is saved next; chunks end there."""
        if not self._cache.takes_snapshots or request.wants_prompt_logits:
            return {}
        size = self._cache.page_size
        if request.state is RequestState.DECODE:
            return {(request.fed // size + 1) * size: SnapshotKind.TURN_END}
        return self._policy.snapshots_of_prompt(
            request.fed, request.prefill_end, junction=request.junction, page_size=size
        )
