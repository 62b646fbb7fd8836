"""The loop on one page: add, abort, step."""

from __future__ import annotations

import logging
import random
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from leadline.cache.manager import CacheManager
from leadline.cache.replay import ReplayPolicy
from leadline.config.engine import SchedulerConfig
from leadline.core.client import EngineStats
from leadline.core.errors import BadRequest, EngineOverloaded, LeadlineError
from leadline.core.request import (
    EngineRequest,
    FinishReason,
    Request,
    RequestState,
    SamplingParams,
    TokenOutput,
)
from leadline.engine.batch_builder import BatchBuilder
from leadline.engine.forwards import Eager, Forwards
from leadline.engine.limits import RequestLimits
from leadline.engine.metrics import EngineMetrics
from leadline.engine.plan import GroupResult, StepPlan
from leadline.engine.runner import Runner, StepInFlight
from leadline.engine.scheduler import Scheduler
from leadline.kernels.registry import REFERENCE, Kernels
from leadline.models.batch import Model

if TYPE_CHECKING:
    from leadline.engine.constraint import ConstraintState
    from leadline.engine.grammar import GrammarCompiler
    from leadline.engine.sampler import Sampler

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _LogitsJob:
    """A prompt whose logits are collected chunk by chunk, and who waits for them."""

    logits: NDArray[np.float32]
    done: Callable[[NDArray[np.float32] | LeadlineError], None]


class Engine:
    """Requests in, tokens out, one ``step`` at a time; knows ids only, never text.

    Not thread-safe: one caller adds, aborts and steps (``async_engine`` in a process of its own).

    Args:
        model: the backbone; owns its cache tensors, sized as ``cache`` counts them.
        sampler: draws tokens from logits.
        cache: pages and slots.
        copy_slots: copies slots of the cache's tensors, ``(from, to)`` pairs.
        policy: what is replayed after a prefix hit.
        config: budgets of a step.
        asynchronous: plan the next step while one runs; the tokens are the same.
        checks_integrity: prove the books after every step.
        vocab_size: ids of requests lie below it.
        eos_token_id: ends a request unless it ignores it.
        max_model_len: prompt and output tokens of one request.
        num_history: ids before a chunk that the model reads (``engram_max_ngram_size`` - 1).
        page_bytes: of the cache's layout, for who asks.
        slot_bytes: the same.
        device: where the model runs.
        kernels: what runs the ops of the forward and of sampling.
        graphs: of the model's forward; without them it runs op by op.
        seed: of the seeds that requests without one get.
        grammars: compiles constraints; without it, requests that have one are refused.
        clock: seconds; orders arrivals.

    Attributes:
        model: as it was given; what runs beside serving (profiles) asks it about its cache.
        cache: the books of its memory.
        limits: of requests.
        metrics: what has happened so far.
    """

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        cache: CacheManager,
        copy_slots: Callable[[Sequence[tuple[int, int]]], None],
        policy: ReplayPolicy,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        eos_token_id: int,
        max_model_len: int,
        num_history: int,
        page_bytes: int = 0,
        slot_bytes: int = 0,
        device: torch.device | str = "cpu",
        kernels: Kernels = REFERENCE,
        graphs: Forwards | None = None,
        seed: int = 0,
        grammars: GrammarCompiler | None = None,
        asynchronous: bool = False,
        checks_integrity: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = RequestLimits(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_pages=cache.num_pages,
            page_size=cache.page_size,
            max_open=config.max_num_queued_reqs,
            max_queued_tokens=config.max_num_queued_tokens,
        )
        self.metrics = EngineMetrics(clock)
        self.model, self.cache = model, cache
        self._page_bytes, self._slot_bytes = page_bytes, slot_bytes
        self._scheduler = Scheduler(
            config, cache, self.metrics, policy, eos_token_id=eos_token_id, clock=clock
        )
        builder = BatchBuilder(num_history=num_history, device=torch.device(device))
        forwards = graphs or Eager(model, builder)
        self._runner = Runner(model, sampler, forwards, self.metrics, copy_slots, kernels)
        self._asynchronous = asynchronous
        self._checks_integrity = checks_integrity
        self._in_flight: StepInFlight | None = None
        self._clock = clock
        self._seeds = random.Random(seed)
        self._paused = False
        self._outputs: list[TokenOutput] = []  # of what ended between two steps
        self._logits_jobs: dict[str, _LogitsJob] = {}
        self._grammars = grammars
        self._compiling: dict[Request, Future[ConstraintState]] = {}
        self._on_compiled: Callable[[], None] = lambda: None
        self._last_progress = clock()

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            BadRequest: it can never be served, or its id is in use.
            EngineOverloaded: the queue is full.
        """
        sampling, now = self.limits.check(request), self._clock()
        timeout, constraint = request.timeout_seconds, request.constraint
        if constraint is not None and self._grammars is None:
            raise BadRequest(
                "structured outputs and strict tools need the package llguidance and a model with "
                "a tokenizer; this server lacks one of them",
                param="structured_outputs",
            )
        live = Request(
            request_id=request.request_id,
            tokens=array("i", request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling=sampling,
            arrival=now,
            deadline=None if timeout is None else now + timeout,
            priority=request.priority,
            session_key=request.session_key,
            cache_salt=request.cache_salt,
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            prompt_logprobs=None if sampling.prompt_logprobs is None else [None],
            is_deferred=constraint is not None,
            bad_token_ids=request.bad_token_ids,
            thinking_budget=request.thinking_budget,
        )
        self._queue(live)
        if constraint is not None and self._grammars is not None:
            compiling = self._compiling[live] = self._grammars.compile(constraint)
            compiling.add_done_callback(lambda _: self._on_compiled())

    def add_prompt_logits(
        self,
        request_id: str,
        token_ids: Sequence[int],
        done: Callable[[NDArray[np.float32] | LeadlineError], None],
    ) -> None:
        """Queue a prompt whose logits are wanted at every position; nothing is sampled.

        It shares the engine with everybody else. ``done`` gets float32 ``[T, V]``, or the error
        that ended it; no ``TokenOutput`` tells of it.

        Raises:
            BadRequest: it can never be served, or its id is in use.
            EngineOverloaded: the queue is full.
        """
        self.limits.check_prompt(token_ids, num_new=0)
        self._queue(
            Request(
                request_id=request_id,
                tokens=array("i", token_ids),
                num_prompt_tokens=len(token_ids),
                sampling=SamplingParams(max_tokens=0),
                arrival=self._clock(),
                wants_prompt_logits=True,
            )
        )
        logits = np.empty((len(token_ids), self.limits.vocab_size), np.float32)
        self._logits_jobs[request_id] = _LogitsJob(logits, done)

    def _queue(self, request: Request) -> None:
        if request.request_id in self._scheduler:
            raise BadRequest(f"request id {request.request_id!r} is in use", param="request_id")
        self.limits.check_room(self._scheduler.num_requests, self.metrics.ends)
        if self.limits.max_queued_tokens:
            queued = self._scheduler.num_queued_tokens
            self.limits.check_queue(request.num_prompt_tokens, queued, self.metrics.feeding)
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request; its output comes with the next step. An unknown id is ignored."""
        output = self._scheduler.abort(request_id)
        if output is None:
            logger.debug("abort of request %s, which is unknown or has ended", request_id)
        else:
            self._outputs += self._settle_logits([output])

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do or tell anything."""
        return self.idle_seconds() == 0

    def idle_seconds(self) -> float | None:
        """How long ``step`` would find nothing to do: until the next deadline, or None for ever.

        A call or a compiled grammar (``notify``) may end that earlier.
        """
        can_run = self._scheduler.can_run and not self._paused
        is_compiled = any(future.done() for future in self._compiling.values())
        if self._outputs or self._in_flight or is_compiled or can_run:
            return 0.0
        deadline = self._scheduler.next_deadline
        return None if deadline is None else max(0.0, deadline - self._clock())

    def notify(self, on_compiled: Callable[[], None]) -> None:
        """Have a function called, in another thread, when a grammar has been compiled."""
        self._on_compiled = on_compiled

    def wait(self) -> None:
        """Block while grammars are being compiled and nothing else can be done."""
        while self._compiling and not self.has_work:
            wait(self._compiling.values(), self.idle_seconds(), FIRST_COMPLETED)

    def step(self) -> list[TokenOutput]:
        """Plan, launch and book one step; what is new about requests.

        With asynchronous scheduling the step that is launched is booked by the next call: the
        host plans while the device runs (cache-and-scheduling 5.9).
        """
        outputs, self._outputs = self._outputs, []
        outputs += self._settle_logits(self._scheduler.expire())
        outputs += self._settle_grammars()
        if self._paused:
            return outputs + self._book()
        if self._in_flight is not None:
            self._runner.sample(self._in_flight)
            if self._in_flight.error is not None:
                outputs += self._book()  # its requests end, or are planned anew
        with self.metrics.timed("schedule"):
            plan = self._scheduler.plan()
        if plan is None:  # somebody may have to be preempted: first see what is in flight
            outputs += self._book()
            with self.metrics.timed("schedule"):
                plan = self._scheduler.plan()
            assert plan is not None
        launched = self._runner.launch(plan, self._in_flight) if plan.groups else None
        outputs += self._book()
        self._in_flight = launched
        self._last_progress = self._clock() if launched else self._last_progress
        if not self._asynchronous:
            outputs += self._book()
        if self._checks_integrity:
            self.check_integrity()
        return outputs

    def _book(self) -> list[TokenOutput]:
        """Book the step in flight, if there is one; what is new about its requests."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        self._runner.sample(step)
        results = self._runner.results(step)
        if step.is_short:
            torch.cuda.empty_cache()  # what it held is free by now, in pieces of its own sizes
            assert step.error is not None
            return self._settle_logits(self._scheduler.undo(step.plan, step.error))
        self._last_progress = self._clock()
        self._collect_logits(step.plan, results)
        with self.metrics.timed("schedule"):
            return self._settle_logits(self._scheduler.apply(step.plan, results))

    def _settle_grammars(self) -> list[TokenOutput]:
        """Let requests run whose grammars are compiled; end those whose grammars cannot be."""
        outputs = []
        for request, compiled in list(self._compiling.items()):
            is_over = request.state is RequestState.FINISHED  # aborted or late
            if not (is_over or compiled.done()):
                continue
            del self._compiling[request]
            if is_over:
                if compiled not in self._compiling.values():
                    compiled.cancel()  # in the queue it would delay others
                continue
            error = compiled.exception()
            if error is None:
                request.constraint, request.is_deferred = compiled.result().copy(), False
            elif isinstance(error, BadRequest):
                outputs.append(self._scheduler.refuse(request, error))
            else:
                logger.error("a grammar could not be compiled", exc_info=error)
                outputs.append(self._scheduler.fail(request, "its grammar could not be compiled"))
        return outputs

    def _collect_logits(self, plan: StepPlan, results: list[GroupResult]) -> None:
        for group, result in zip(plan.groups, results, strict=True):
            if result.logits is not None:
                job = self._logits_jobs[group.request.request_id]
                job.logits[group.start : group.end] = result.logits

    def _settle_logits(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Answer those who wait for prompt logits; the outputs of the other requests."""
        others = []
        for output in outputs:
            job = self._logits_jobs.pop(output.request_id, None)
            if job is None:
                others.append(output)
            elif output.finish_reason is FinishReason.LENGTH:
                job.done(job.logits)
            else:
                job.done(LeadlineError(output.error or f"request {output.request_id} was aborted"))
        return others

    def prompt_logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Step until the logits of every position of a prompt are there: float32 ``[T, V]``.

        Raises:
            BadRequest: the prompt can never be served.
            EngineOverloaded: the engine is paused or its queue is full.
            LeadlineError: the forward pass failed.
        """
        if self._paused:
            raise EngineOverloaded("the engine is paused, so it computes no prompt logits")
        answers: list[NDArray[np.float32] | LeadlineError] = []
        self.add_prompt_logits("prompt-logits", token_ids, answers.append)
        while not answers:
            # What others get meanwhile is theirs: it comes with the caller's next step.
            self._outputs = self.step()
        [answer] = answers
        if isinstance(answer, LeadlineError):
            raise answer
        return answer

    def pause(self, paused: bool) -> None:
        """Stop or resume scheduling; requests stay as they are and may still be aborted."""
        self._paused = paused

    def reset_prefix_cache(self) -> bool:
        """Forget every cached page that no request holds; False when some stayed."""
        return self.cache.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """The engine's counters and gauges now."""
        is_busy = bool(self._scheduler.running) and not self._paused
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_pages=self.cache.num_pages,
            num_free_pages=self.cache.num_free_pages,
            num_cached_pages=self.cache.num_cached_pages,
            num_slots=self.cache.num_slots,
            num_free_slots=self.cache.num_free_slots,
            num_deferred=self._scheduler.num_deferred,
            num_hot_slots=self.cache.num_hot_slots,
            num_queued_tokens=self._scheduler.num_queued_tokens,
            stalled_seconds=self._clock() - self._last_progress if is_busy else 0.0,
            page_size=self.cache.page_size,
            page_bytes=self._page_bytes,
            slot_bytes=self._slot_bytes,
            max_model_len=self.limits.max_model_len,
            counters={**self.metrics.counters, "evicted_pages": self.cache.num_evicted_pages},
            iteration_tokens=self.metrics.iteration_tokens,
            finished=dict(self.metrics.finished),
            step_seconds=dict(self.metrics.step_seconds),
        )

    def check_integrity(self) -> None:
        """Assert that queues, pages and slots agree (cache-and-scheduling 7, 1 to 6)."""
        self._scheduler.check_integrity()
