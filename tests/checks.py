"""A scheduler that proves every plan it makes against the rules of cache-and-scheduling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from leadline.cache.manager import CacheManager
from leadline.cache.replay import ReplayPolicy
from leadline.config.engine import SchedulerConfig
from leadline.core.request import Request, RequestState, TokenOutput
from leadline.engine.admission import max_positions
from leadline.engine.metrics import EngineMetrics
from leadline.engine.plan import GroupResult, RowGroup, RowKind, StepPlan
from leadline.engine.scheduler import Scheduler


class CheckedScheduler(Scheduler):
    """Asserts invariants 1 to 6, 13, 21, 26, 30, 32, 33, 36 and 38 on whatever it is used for.

    Attributes:
        plans: every plan with rows, oldest first.
        first_fed: (request, generation) -> the first position that was fed.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        metrics: EngineMetrics,
        policy: ReplayPolicy,
        *,
        eos_token_id: int,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(config, cache, metrics, policy, eos_token_id=eos_token_id, clock=clock)
        self._policy = policy
        self.plans: list[StepPlan] = []
        self._is_stalled = False
        self.first_fed: dict[tuple[Request, int], int] = {}
        self._num_upper: dict[tuple[Request, int], int] = defaultdict(int)

    def plan(self) -> StepPlan | None:
        decoding = [
            r
            for r in self.running
            if r.state is RequestState.DECODE
            and r.num_output_tokens + r.in_flight < r.sampling.max_tokens
        ]
        num_preemptions = self._metrics.counters["num_preemptions"]
        plan = super().plan()
        if plan is None:
            return None
        self._check_budgets(plan, decoding)
        for group in plan.groups:
            self._check_rows(group)
            if group.kind is RowKind.PREFILL:
                self._check_prefill(group)
            self._check_window(group)
        if num_preemptions == self._metrics.counters["num_preemptions"]:
            self._check_priority(plan)
        self._check_progress(plan)
        if plan.groups:
            self.plans.append(plan)
        return plan

    def apply(self, plan: StepPlan, results: Sequence[GroupResult]) -> list[TokenOutput]:
        stale = [
            (group.request, bytes(group.request.tokens), group.request.state)
            for group in plan.groups
            if group.is_stale
        ]
        outputs = super().apply(plan, results)
        for request, tokens, state in stale:
            assert (bytes(request.tokens), request.state) == (tokens, state), (
                f"invariant 35: a stale result changed request {request.request_id}"
            )
        self.check_integrity()
        return outputs

    def undo(self, plan: StepPlan, shortage: str) -> list[TokenOutput]:
        outputs = super().undo(plan, shortage)
        self.check_integrity()
        return outputs

    def _check_budgets(self, plan: StepPlan, decoding: list[Request]) -> None:
        """Invariant 32, while memory is short for as many decodes as there is memory for."""
        config, groups, most = self._config, plan.groups, self._budget.rows
        decodes = [group.request for group in groups if group.kind is RowKind.DECODE]
        assert plan.num_rows == sum(g.num_rows for g in groups) <= most
        assert most <= config.max_num_batched_tokens
        assert len({g.request.slot for g in groups}) == len(groups), "two groups share a slot"
        assert len(self.running) <= config.max_num_seqs
        if decodes:
            assert plan.num_prefill_rows <= config.max_prefill_rows
        preempted = [r for r in decoding if r.state is RequestState.WAITING]
        due = min(most, len(decoding) - len(preempted))
        assert len(decodes) == due, "a decode was not scheduled"
        prefills = [r for r in self.running if r.state is RequestState.PREFILL]
        assert len(prefills) <= config.max_prefills

    def _check_rows(self, group: RowGroup) -> None:
        """Invariants 2, 6, 13 and 17: rows lie in pages of their own that nobody else reads."""
        request, size = group.request, self._cache.page_size
        assert group.num_rows > 0
        assert not group.is_stale
        assert group.end == request.fed
        first_written = max(group.start, request.cached)
        if first_written < group.end:
            assert first_written // size >= request.committed, (
                f"request {request.request_id} writes position {first_written}, but its first "
                f"{request.committed} pages are indexed"
            )
        needed = self._cache.pages_of(max(group.end, request.cached))
        assert needed <= len(request.pages) <= needed + 1

    def _check_prefill(self, group: RowGroup) -> None:
        request, end = group.request, group.request.prefill_end
        key = request, request.generation
        is_first = key not in self.first_fed
        first_fed = self.first_fed.setdefault(key, group.start)
        threshold = self._config.long_prefill_threshold
        if threshold is not None:
            assert group.num_rows <= threshold
        if group.end < min(request.cached, request.floor_up):
            assert request.cached - group.start > self._chunks.largest, "a replay was split"
        if not self._policy.needs_snapshot:  # snapshots cut chunks too
            assert not group.start < request.floor_up < group.end < end, "a chunk ran over U"
        if is_first and request.cached and request.floor_lo == self._policy.start(request.cached):
            assert self._policy.lower or first_fed == request.cached
        self._num_upper[key] += group.num_upper
        if group.end == end:
            self._check_whole_prefill(request, first_fed, self._num_upper.pop(key))

    def _check_whole_prefill(self, request: Request, first_fed: int, num_upper: int) -> None:
        """Invariants 21, 26 and 36."""
        end, cached = request.prefill_end, request.cached
        replayed = max(0, cached - first_fed)
        assert replayed <= self._policy.length
        assert num_upper == end - max(first_fed, request.floor_up)
        if self._policy.upper and not request.reads_prompt:
            assert num_upper <= self._policy.length or not self._policy.lower
            if first_fed == request.floor_lo:  # neither a snapshot nor a hot slot
                assert num_upper == min(end - first_fed, self._policy.length)
        if not request.num_preemptions:
            assert request.num_replayed_tokens == replayed
            assert request.num_cached_tokens == min(cached, request.num_prompt_tokens - 1)
            assert cached + (end - first_fed) == end + replayed

    def _check_window(self, group: RowGroup) -> None:
        """Invariant 30: decodes, and the row that the first token comes from, miss no key.

        Snapshots of a trimmed upper half may begin too late for that.
        """
        request, window = group.request, self._policy.window
        if group.end >= request.prefill_end and not request.wants_prompt_logits:
            first = max(0, group.end - window)
            assert request.floor_lo <= first
            if self._policy.lower or not self._policy.upper:
                assert request.floor_up <= first

    def _check_priority(self, plan: StepPlan) -> None:
        """Invariant 38, where nobody ages: the first of the highest class had no room at all."""
        prefills = [g.request for g in plan.groups if g.kind is RowKind.PREFILL]
        ready = [r for r in self.waiting if not r.is_deferred]
        first = min(ready, key=lambda r: r.priority, default=None)
        if first is None or first.priority >= max((r.priority for r in prefills), default=-99):
            return
        num_prefills = len(
            {*prefills, *(r for r in self.running if r.state is RequestState.PREFILL)}
        )
        if num_prefills >= self._config.max_prefills or not self._cache.num_free_slots:
            return
        whole = self._cache.pages_of(min(len(first.tokens) + 1, max_positions(first))) + 1
        missing = sum(
            max(0, self._cache.pages_of(r.prefill_end) + 1 - len(r.pages)) for r in self.running
        )
        watermark = max(self._cache.num_pages // 100, len(self.running))
        assert whole + missing + watermark > self._cache.num_free_pages, (
            f"request {first.request_id} of class {first.priority} fits and waits"
        )

    def _check_progress(self, plan: StepPlan) -> None:
        """Invariant 33: never twice in a row nothing to do while requests are open."""
        is_stalled = self.can_run and not plan.groups
        assert not (is_stalled and self._is_stalled), "requests are open and nothing was scheduled"
        self._is_stalled = is_stalled
