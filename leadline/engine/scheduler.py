"""Who runs next, with how many rows: budgets, admission, preemption. No torch.

A step is planned (``plan``), run by somebody else, and booked (``apply``). Decode rows come first,
then running prefills, then admissions (cache-and-scheduling 5.2 and 8.4). Steps may be planned
before earlier ones are booked: then a request's newest token is unknown, and only its place is.
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from leadline.cache.manager import CacheManager
from leadline.cache.replay import ReplayPolicy, num_upper_rows
from leadline.config.engine import SchedulerConfig
from leadline.core.errors import BadRequest
from leadline.core.request import FinishReason, Request, RequestState, TokenOutput
from leadline.engine.admission import Admission
from leadline.engine.booking import book, output_of
from leadline.engine.chunks import Chunks
from leadline.engine.metrics import EngineMetrics
from leadline.engine.plan import GroupResult, RowGroup, RowKind, StepPlan
from leadline.engine.row_budget import RowBudget
from leadline.engine.waiting import WaitingQueue

logger = logging.getLogger(__name__)

# A request preempted this often is spared while others of its class run (5.4).
MAX_PREEMPTIONS = 3


class Scheduler:
    """Requests from arrival to their end, and the plan of every step.

    Attributes:
        waiting: requests without a slot.
        running: requests with a slot. The order is both that of service and, from the end, that
            of preemption, so a victim is never already part of the plan.
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
        self._config = config
        self._cache = cache
        self._metrics = metrics
        self._eos_token_id = eos_token_id
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._num_unbooked = 0  # steps planned and not yet applied
        self._admission = Admission(cache, metrics, policy)
        self._budget = RowBudget(config.max_num_batched_tokens)
        self._chunks = Chunks(config, cache, policy, self._budget)
        self.waiting = WaitingQueue(config.priority_aging_seconds)
        self.running: list[Request] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def can_run(self) -> bool:
        """Whether some request is not deferred."""
        return bool(self.running) or any(not request.is_deferred for request in self.waiting)

    @property
    def num_deferred(self) -> int:
        """Waiting requests that cannot be admitted yet."""
        return sum(request.is_deferred for request in self.waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that no step has fed yet."""
        return sum(max(0, r.num_prompt_tokens - r.fed) for r in self._requests.values())

    @property
    def next_deadline(self) -> float | None:
        """The clock's seconds at which ``expire`` has something to do next."""
        deadlines = (r.deadline for r in self._requests.values() if r.deadline is not None)
        return min(deadlines, default=None)

    def add(self, request: Request) -> None:
        """Queue a request that fits the model and the cache (``RequestLimits`` has checked)."""
        self._requests[request.request_id] = request
        self.waiting.add(request)

    def refuse(self, request: Request, refusal: BadRequest) -> TokenOutput:
        """End a waiting request that turned out to be impossible, as if it had never come in."""
        self.waiting.remove(request)
        del self._requests[request.request_id]
        request.state = RequestState.FINISHED
        return TokenOutput(request.request_id, finish_reason=FinishReason.ERROR, refusal=refusal)

    def fail(self, request: Request, error: str) -> TokenOutput:
        """End a request with an error that is not its own fault."""
        return self._finish(request, FinishReason.ERROR, error=error)

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request now, whatever its state; None for an unknown or finished id."""
        request = self._requests.get(request_id)
        return self._finish(request, FinishReason.ABORT) if request else None

    def expire(self) -> list[TokenOutput]:
        """End the requests whose deadline has passed."""
        now = self._clock()
        late = [r for r in self._requests.values() if r.deadline is not None and r.deadline <= now]
        return [
            self._finish(
                request,
                FinishReason.TIMEOUT,
                error=f"request {request.request_id}: its deadline passed after "
                f"{now - request.arrival:.1f} s",
            )
            for request in late
        ]

    def check_integrity(self) -> None:
        """Assert that queues, states and the cache's books agree."""
        for request in self.waiting:
            assert request.state is RequestState.WAITING, request
            assert not request.slot, request
        for request in self.running:
            assert request.state in (RequestState.PREFILL, RequestState.DECODE), request
            assert request.slot, request
        live = [*self.waiting, *self.running]
        assert {id(request) for request in live} == {id(r) for r in self._requests.values()}
        assert len(live) == len(self._requests)
        self._cache.check_integrity(live)

    # ---- plan -------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step: decodes, then running prefills, then admissions (5.2).

        Returns:
            The step; None when a step in flight must be booked first, because a request of it may
            have to be preempted (5.9). Empty only when nothing can be fed before such a booking.
        """
        decodes = [r for r in self.running if r.state is RequestState.DECODE and _may_go_on(r)]
        # The last ones keep their place, which costs a step nothing, until memory suffices again.
        decodes = decodes[: self._budget.rows]
        if self._num_unbooked and self._missing_pages(decodes) > self._cache.num_free_pages:
            return None
        plan = StepPlan()
        num_preemptions = self._metrics.counters["num_preemptions"]
        self._plan_decodes(plan, decodes)
        may_admit = self._metrics.counters["num_preemptions"] == num_preemptions
        for request in self._prefills_in_turn():
            if may_admit:  # a higher class does not wait for the rows of a lower one
                self._admit(plan, above=request.priority)
            self._plan_prefill(plan, request)
        if may_admit:
            self._admit(plan)
        self._num_unbooked += bool(plan.groups)
        return plan

    def _missing_pages(self, decodes: list[Request]) -> int:
        return sum(self._cache.pages_of(r.fed + 1) > len(r.pages) for r in decodes)

    def _plan_decodes(self, plan: StepPlan, decodes: list[Request]) -> None:
        """Each of these gets its row; the last of ``running`` pays for missing pages."""
        for request in decodes:
            # An earlier one of this pass may have preempted it.
            while request.state is RequestState.DECODE:
                if self._cache.grow(request, request.fed + 1):
                    self._add_rows(plan, request, RowKind.DECODE, request.fed + 1)
                    break
                self._preempt(self.running[-1])

    def _prefills_in_turn(self) -> list[Request]:
        """Running prefills; with a threshold they take turns within their class (5.4)."""
        prefills = [r for r in self.running if r.state is RequestState.PREFILL]
        if self._config.long_prefill_threshold is not None:
            prefills.sort(key=lambda r: (r.priority, r.fed / r.prefill_end))
        return prefills

    def _plan_prefill(self, plan: StepPlan, request: Request) -> None:
        """Feed the next chunk, as long as the budgets allow (5.3).

        Without pages it waits: then decodes hold what was reserved for it, and they end.
        """
        end = request.fed + self._chunks.num_rows(plan, request)
        if end > request.fed and self._cache.grow(request, max(end, request.cached)):
            self._add_rows(plan, request, RowKind.PREFILL, end)

    def _add_rows(self, plan: StepPlan, request: Request, kind: RowKind, end: int) -> None:
        start, num_rows = request.fed, end - request.fed
        num_upper = num_upper_rows(start, end, request.floor_up)
        num_sampled = num_rows if request.reads_prompt else 0
        if end >= request.prefill_end and request.sampling.max_tokens:
            num_sampled = max(1, num_sampled)
            request.in_flight += 1
            request.state = RequestState.DECODE
        plan.groups.append(
            RowGroup(request, kind, start, num_rows, num_upper, num_sampled, request.generation)
        )
        plan.num_rows += num_rows
        if kind is RowKind.PREFILL:
            plan.num_prefill_rows += num_rows
            replayed = max(0, min(end, request.cached) - start)
            self._metrics.counters["replayed_tokens"] += replayed
            self._metrics.counters["computed_tokens"] += num_rows - replayed
        self._metrics.counters["upper_rows"] += num_upper
        boundaries = self._chunks.snapshots_due(request)
        request.fed = end
        if end in boundaries:
            snapshot = self._cache.save_snapshot(request, end, boundaries[end])
            if snapshot is not None:
                plan.copies_after.append((request.slot, snapshot))

    # ---- admission --------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, *, above: int | None = None) -> None:
        """Let waiting requests in while slots, pages and the row budget last (5.5).

        A request that does not fit may be passed by later ones, but only ``max_bypass`` times.

        Args:
            plan: the step so far.
            above: only classes above this one, where it is given.
        """
        candidates = self._candidates(above)
        if not candidates:
            return
        num_prefills = sum(r.state is RequestState.PREFILL for r in self.running)
        reserved = self._admission.reserved_pages(self.running)
        passes_left = self._config.max_bypass
        skipped: list[Request] = []
        for request in candidates:
            if (
                num_prefills == self._config.max_prefills
                or not self._cache.num_free_slots
                or self._chunks.room(plan) <= 0
            ):
                break
            if self._start(plan, request, reserved):
                self._plan_prefill(plan, request)
                num_prefills += request.state is RequestState.PREFILL
                reserved = self._admission.reserved_pages(self.running)
                for other in skipped:
                    other.num_bypassed += 1
                passes_left -= bool(skipped)
            else:
                skipped.append(request)
                passes_left = min(passes_left, self._config.max_bypass - request.num_bypassed)
            if skipped and passes_left <= 0:
                break

    def _candidates(self, above: int | None) -> list[Request]:
        """Waiting requests, next one first."""
        if not any(above is None or r.priority < above for r in self.waiting if not r.is_deferred):
            return []
        sessions = Counter(r.session_key for r in self.running if r.session_key)
        order = self.waiting.in_order(self._clock(), sessions)
        return [r for r in order if not r.is_deferred and (above is None or r.priority < above)]

    def _start(self, plan: StepPlan, request: Request, reserved: int) -> bool:
        """Move a waiting request to the running ones; False where it does not fit."""
        copies = self._admission.admit(request, reserved)
        if copies is None:
            return False
        plan.copies_before += copies
        self.waiting.remove(request)
        if not request.num_preemptions:
            request.queue_seconds = self._clock() - request.arrival
        bisect.insort(self.running, request, key=_running_order)
        return True

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request; it is computed again later (5.7).

        It waits in front of its class and nobody passes it, or the pages it gave up would go
        to a newcomer and be taken again.
        """
        assert not request.in_flight, "a step in flight is booked before its request is preempted"
        self.running.remove(request)
        self._cache.release(request)
        request.state = RequestState.WAITING
        request.junction = 0
        request.fed = request.confirmed = request.cached = request.prefill_end = 0
        request.floor_lo = request.floor_up = 0
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        request.generation += 1
        request.num_preemptions += 1
        request.num_bypassed = self._config.max_bypass
        self._metrics.counters["num_preemptions"] += 1
        self.waiting.add(request)

    # ---- apply ------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, results: Sequence[GroupResult]) -> list[TokenOutput]:
        """Book a step: append tokens, index full pages, end what has ended, say what is new.

        Args:
            plan: the oldest step that is not booked yet.
            results: one per group of the plan, in its order.
        """
        self._num_unbooked -= 1
        self._metrics.count_step(plan.num_rows, plan.num_prefill_rows)
        self._budget.grow(plan.num_rows)
        outputs = []
        for group, result in zip(plan.groups, results, strict=True):
            if group.is_stale:
                continue
            request = group.request
            request.confirmed = max(request.confirmed, group.end)
            if result.error is None:
                self._cache.commit(request, request.confirmed)
            output = book(group, result, self._eos_token_id)
            if output is not None:
                self._metrics.counters["generation_tokens"] += len(output.token_ids)
                if output.finish_reason is not None:
                    self._forget(request, output.finish_reason)
                outputs.append(output)
        return outputs

    def undo(self, plan: StepPlan, shortage: str) -> list[TokenOutput]:
        """Have a step that did not fit into memory planned again, as several smaller ones.

        Its forward may have ended anywhere. Decode rows are just fed again: neither a ring nor an
        open group has lost what they read, since both have room for several such rows (1.4). A
        chunk of a prompt may have taken the place of the window before it in some layers, so its
        request is computed again as after a preemption. Both are new generations: what a later
        step computed of these requests is dropped.

        Args:
            plan: the oldest step that is not booked yet.
            shortage: what was missing.

        Returns:
            The end of a request of which a single row does not fit, tried twice; else nothing.
        """
        self._num_unbooked -= 1
        self._metrics.counters["oom_steps"] += 1
        self._budget.shrink(plan.num_rows)
        logger.warning(
            "memory was short for a step of %d rows; for now they have %d at most: %s",
            *(plan.num_rows, self._budget.rows, shortage),
        )
        outputs = []
        for group in plan.groups:
            request = group.request
            if group.is_stale:
                continue
            if plan.num_rows == 1 and request.short_at == group.start:
                error = f"request {request.request_id}: no step of it fits into memory: {shortage}"
                outputs.append(self.fail(request, error))
                continue
            if plan.num_rows == 1:
                request.short_at = group.start
            request.in_flight = 0
            if group.kind is RowKind.DECODE:
                request.fed = group.start
                request.generation += 1
            else:
                self._preempt(request)
        return outputs

    def _finish(
        self, request: Request, reason: FinishReason, *, error: str | None = None
    ) -> TokenOutput:
        """End a request between two steps."""
        self._forget(request, reason)
        return output_of(request, reason, error=error)

    def _forget(self, request: Request, reason: FinishReason) -> None:
        """Take a request out of the books, and its memory back."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        del self._requests[request.request_id]
        stays_hot = self._may_stay_hot(request, reason)
        if not (stays_hot and self._cache.keep_hot(request, request.confirmed)):
            self._cache.release(request)
        request.state = RequestState.FINISHED
        request.generation += 1
        self._metrics.count_end(reason)

    @staticmethod
    def _may_stay_hot(request: Request, reason: FinishReason) -> bool:
        ended_well = reason in (FinishReason.STOP, FinishReason.LENGTH)
        return ended_well and request.sampling.max_tokens > 0


def _may_go_on(request: Request) -> bool:
    """Whether another token is wanted, as far as the steps in flight let us know."""
    return request.num_output_tokens + request.in_flight < request.sampling.max_tokens


def _running_order(request: Request) -> tuple[int, bool, float]:
    """By class; often preempted requests first; then by arrival (5.4)."""
    return request.priority, request.num_preemptions < MAX_PREEMPTIONS, request.arrival
