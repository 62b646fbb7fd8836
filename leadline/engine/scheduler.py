"""Who runs next, with how many rows: queues, budgets, admission, preemption. No torch.

A step is planned (``plan``), run by somebody else, and booked (``apply``). Decode rows come first,
then running prefills, then admissions (cache-and-scheduling 5.2 and 8.4).
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from leadline.cache.manager import CacheManager
from leadline.config.engine import SchedulerConfig
from leadline.core.request import FinishReason, Request, RequestState, TokenLogprobs, TokenOutput
from leadline.engine.metrics import EngineMetrics

if TYPE_CHECKING:
    import numpy as np

# A request preempted this often is spared while others of its class run (5.4).
MAX_PREEMPTIONS = 3


class RowKind(enum.Enum):
    """Whether a group's rows belong to a known prompt or continue it."""

    PREFILL = enum.auto()
    DECODE = enum.auto()


@dataclass(slots=True)
class RowGroup:
    """One request's rows of a step: positions ``[start, start + num_rows)``.

    Attributes:
        num_upper: the last rows of the group that run the upper half.
        num_sampled: the last rows whose logits are wanted; at most ``num_upper``.
    """

    request: Request
    kind: RowKind
    start: int
    num_rows: int
    num_upper: int
    num_sampled: int

    @property
    def end(self) -> int:
        return self.start + self.num_rows


@dataclass(slots=True)
class StepPlan:
    """The row groups of one step, at most one per request."""

    groups: list[RowGroup] = field(default_factory=list)
    num_rows: int = 0
    num_prefill_rows: int = 0


@dataclass(slots=True)
class GroupResult:
    """What a step brought for one group.

    Attributes:
        token_ids: sampled tokens; none where no row was sampled.
        logprobs: one per token when the request asked for them.
        logits: float32 ``[num_rows, V]`` of a prompt-logits group.
        error: why the request cannot go on.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    logits: np.ndarray | None = None
    error: str | None = None


class Scheduler:
    """Requests from arrival to their end, and the plan of every step.

    Attributes:
        waiting: requests without a slot, next one first.
        running: requests with a slot. The order is both that of service and, from the end, that
            of preemption, so a victim is never already part of the plan.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        metrics: EngineMetrics,
        *,
        eos_token_id: int,
    ) -> None:
        self._config = config
        self._cache = cache
        self._metrics = metrics
        self._eos_token_id = eos_token_id
        self._requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request that fits the model and the cache (``RequestLimits`` has checked)."""
        self._requests[request.request_id] = request
        bisect.insort(self.waiting, request, key=_waiting_order)

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request now, whatever its state; None for an unknown or finished id."""
        request = self._requests.get(request_id)
        return self._finish(request, FinishReason.ABORT) if request else None

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

    def plan(self) -> StepPlan:
        """The next step: decodes, then running prefills, then admissions (5.2).

        Never empty while there is a request: a decode runs or is preempted, prefills without
        decodes find the pages that were reserved for them, and with nothing running the first in
        ``waiting`` fits.
        """
        plan = StepPlan()
        has_preempted = self._plan_decodes(plan)
        for request in self.running:
            if request.state is RequestState.PREFILL:
                self._plan_prefill(plan, request)
        if not has_preempted:
            self._admit(plan)
        return plan

    def _plan_decodes(self, plan: StepPlan) -> bool:
        """Every decode request gets its rows; the last of ``running`` pays for missing pages.

        Returns:
            Whether anything was preempted.
        """
        has_preempted = False
        for request in [r for r in self.running if r.state is RequestState.DECODE]:
            # Until it has its pages, or is itself the last one.
            while request.state is RequestState.DECODE:
                if self._cache.grow(request, len(request.tokens)):
                    self._add_rows(plan, request, RowKind.DECODE, len(request.tokens))
                    break
                self._preempt(self.running[-1])
                has_preempted = True
        return has_preempted

    def _plan_prefill(self, plan: StepPlan, request: Request) -> None:
        """Feed the next chunk, as long as the budgets allow (5.3).

        Without pages it waits: then decodes hold what was reserved for it, and they end.
        """
        end = min(request.prefill_end, request.fed + self._prefill_room(plan))
        if end > request.fed and self._cache.grow(request, end):
            self._add_rows(plan, request, RowKind.PREFILL, end)

    def _prefill_room(self, plan: StepPlan) -> int:
        """Prefill rows that still fit: within T, and within P_max beside decode rows (5.2)."""
        left = self._config.max_num_batched_tokens - plan.num_rows
        if plan.num_rows > plan.num_prefill_rows:
            left = min(left, self._config.max_prefill_rows - plan.num_prefill_rows)
        return left

    def _add_rows(self, plan: StepPlan, request: Request, kind: RowKind, end: int) -> None:
        num_rows = end - request.fed
        if kind is RowKind.DECODE or request.wants_prompt_logits:
            num_sampled = num_rows
        else:
            num_sampled = 1 if end == request.prefill_end else 0
        plan.groups.append(RowGroup(request, kind, request.fed, num_rows, num_rows, num_sampled))
        plan.num_rows += num_rows
        if kind is RowKind.PREFILL:
            plan.num_prefill_rows += num_rows
        request.fed = end

    def _admit(self, plan: StepPlan) -> None:
        """Let waiting requests in while slots, pages and the row budget last (5.5).

        A request that does not fit may be passed by later ones, but only ``max_bypass`` times.
        """
        num_prefills = sum(r.state is RequestState.PREFILL for r in self.running)
        available = self._available_pages()
        passes_left = self._config.max_bypass
        skipped: list[Request] = []
        for request in tuple(self.waiting):
            if (
                num_prefills == self._config.max_prefills
                or not self._cache.num_free_slots
                or self._prefill_room(plan) <= 0
                or available <= 0
            ):
                break
            if self._prefill_pages(request, len(request.tokens)) > available:
                skipped.append(request)
                passes_left = min(passes_left, self._config.max_bypass - request.num_bypassed)
            else:
                self._start(request)
                self._plan_prefill(plan, request)
                num_prefills += 1
                available = self._available_pages()
                for other in skipped:
                    other.num_bypassed += 1
                passes_left -= bool(skipped)
            if skipped and passes_left <= 0:
                break

    def _start(self, request: Request) -> None:
        """Move a waiting request to the running ones, with a slot and no pages yet."""
        if not request.num_preemptions:
            self._metrics.counters["prompt_tokens"] += request.num_prompt_tokens
        self.waiting.remove(request)
        self._cache.take_slot(request)
        request.state = RequestState.PREFILL
        request.prefill_end = len(request.tokens)
        bisect.insort(self.running, request, key=_running_order)

    def _prefill_pages(self, request: Request, prefill_end: int) -> int:
        """Pages a prefill may still take: those of its rows and one to decode into (5.5).

        Never more than the request can use in its whole life: by the same formula it was found
        feasible at arrival, so it cannot wait for pages that do not exist.
        """
        whole = min(
            self._cache.pages_of(prefill_end) + 1, self._cache.pages_of(max_positions(request))
        )
        return whole - len(request.pages)

    def _available_pages(self) -> int:
        """Free pages that nobody counts on: not running prefills, not growing decodes (5.5)."""
        prefills = [r for r in self.running if r.state is RequestState.PREFILL]
        reserved = sum(self._prefill_pages(r, r.prefill_end) for r in prefills)
        if self.running:
            num_decodes = len(self.running) - len(prefills)
            reserved += max(self._cache.num_pages // 100, min(num_decodes, 64))
        return self._cache.num_free_pages - reserved

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request; it is computed again later (5.7).

        It waits in front of its class and nobody passes it, or the pages it gave up would go
        to a newcomer and be taken again.
        """
        self.running.remove(request)
        self._cache.release(request)
        request.state = RequestState.WAITING
        request.fed = request.prefill_end = 0
        request.num_preemptions += 1
        request.num_bypassed = self._config.max_bypass
        self._metrics.counters["num_preemptions"] += 1
        bisect.insort(self.waiting, request, key=_waiting_order)

    def apply(self, plan: StepPlan, results: Sequence[GroupResult]) -> list[TokenOutput]:
        """Book a step: append tokens, end what has ended, say what is new.

        Args:
            plan: the step that ran.
            results: one per group of the plan, in its order.
        """
        self._metrics.counters["steps"] += 1
        self._metrics.counters["computed_tokens"] += plan.num_prefill_rows
        outputs = []
        for group, result in zip(plan.groups, results, strict=True):
            request = group.request
            if result.error is not None:
                outputs.append(self._finish(request, FinishReason.ERROR, error=result.error))
            elif request.wants_prompt_logits:
                if group.end == request.prefill_end:
                    outputs.append(self._finish(request, FinishReason.LENGTH))
            elif result.token_ids:
                request.state = RequestState.DECODE
                outputs.append(self._append(request, result))
        return outputs

    def _append(self, request: Request, result: GroupResult) -> TokenOutput:
        """Append sampled tokens up to the one that ends the request."""
        for number, token in enumerate(result.token_ids, start=1):
            request.tokens.append(token)
            self._metrics.counters["generation_tokens"] += 1
            reason, stop_token_id = ending(request, self._eos_token_id)
            if reason is not None:
                return self._finish(
                    request,
                    reason,
                    token_ids=result.token_ids[:number],
                    logprobs=result.logprobs[:number],
                    stop_token_id=stop_token_id,
                )
        return TokenOutput(request.request_id, result.token_ids, result.logprobs)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> TokenOutput:
        """Forget a request, take back its memory, and make its last output."""
        (self.waiting if request.state is RequestState.WAITING else self.running).remove(request)
        del self._requests[request.request_id]
        self._cache.release(request)
        request.state = RequestState.FINISHED
        self._metrics.finished[reason.value] += 1
        return TokenOutput(
            request.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            error=error,
        )


def max_positions(request: Request) -> int:
    """Positions that a request reaches at most; decides feasibility at arrival and later (5.5)."""
    if request.wants_prompt_logits:
        return request.num_prompt_tokens
    return request.num_prompt_tokens + request.sampling.max_tokens


def ending(request: Request, eos_token_id: int) -> tuple[FinishReason | None, int | None]:
    """Whether the newest token ends its request, and by which of its ``stop_token_ids``.

    Below ``min_tokens`` no token stops it (serving-api 9.1). ``max_tokens`` was lowered at arrival
    to what ``max_model_len`` leaves, so that length needs no second rule.
    """
    sampling, newest = request.sampling, request.tokens[-1]
    if request.num_output_tokens >= sampling.min_tokens:
        if newest == eos_token_id and not sampling.ignore_eos:
            return FinishReason.STOP, None
        if newest in sampling.stop_token_ids:
            return FinishReason.STOP, newest
    if request.num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH, None
    return None, None


def _waiting_order(request: Request) -> tuple[int, bool, float]:
    """By class; preempted requests at its front; then by arrival (5.4)."""
    return request.priority, not request.num_preemptions, request.arrival


def _running_order(request: Request) -> tuple[int, bool, float]:
    """By class; often preempted requests first; then by arrival (5.4)."""
    return request.priority, request.num_preemptions < MAX_PREEMPTIONS, request.arrival
