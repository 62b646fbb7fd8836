from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.cache.manager import CacheManager
from leadline.cache.sizing import CacheSize, pages_of
from leadline.config.engine import SchedulerConfig
from leadline.core.request import (
    FinishReason,
    Request,
    RequestState,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from leadline.engine.metrics import EngineMetrics
from leadline.engine.scheduler import GroupResult, RowKind, Scheduler, StepPlan

EOS = 1


def next_token(tokens: array[int]) -> int:
    return 2 + (7 * sum(tokens) + len(tokens)) % 95


def make(
    name: str,
    num_prompt: int,
    max_tokens: int,
    *,
    arrival: float = 0.0,
    priority: int = 0,
    **sampling: object,
) -> Request:
    prompt = array("i", random.Random(name).choices(range(2, 97), k=num_prompt))
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Request(name, prompt, num_prompt, params, arrival=arrival, priority=priority)


@dataclass
class Harness:
    """A scheduler with a model that answers at once, and every rule of a step checked."""

    num_pages: int = 9
    num_slots: int = 5
    config: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512)
    )

    def __post_init__(self) -> None:
        self.cache = CacheManager(
            CacheSize(num_pages=self.num_pages, num_slots=self.num_slots, page_size=256)
        )
        self.metrics = EngineMetrics()
        self.scheduler = Scheduler(self.config, self.cache, self.metrics, eos_token_id=EOS)
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, TokenOutput] = {}

    def add(self, request: Request) -> Request:
        self.tokens[request.request_id] = []
        self.scheduler.add(request)
        return request

    def book(self, output: TokenOutput) -> None:
        assert output.request_id not in self.finished, "an output after the last one"
        self.tokens[output.request_id] += output.token_ids
        if output.finish_reason is not None:
            self.finished[output.request_id] = output

    def step(self) -> StepPlan:
        decoding = [r for r in self.scheduler.running if r.state is RequestState.DECODE]
        plan = self.scheduler.plan()
        self.check_plan(plan, decoding)
        results = [
            GroupResult(token_ids=(next_token(g.request.tokens),) if g.num_sampled else ())
            for g in plan.groups
        ]
        for output in self.scheduler.apply(plan, results):
            self.book(output)
        self.scheduler.check_integrity()
        return plan

    def check_plan(self, plan: StepPlan, decoding: list[Request]) -> None:
        """Invariant 32 and what a row group promises."""
        config, groups = self.config, plan.groups
        decodes = [g.request for g in groups if g.kind is RowKind.DECODE]
        assert plan.num_rows == sum(g.num_rows for g in groups) <= config.max_num_batched_tokens
        assert len({g.request.slot for g in groups}) == len(groups)
        assert len(self.scheduler.running) <= config.max_num_seqs
        if decodes:
            assert plan.num_prefill_rows <= config.max_prefill_rows
        preempted = [r for r in decoding if r.state is RequestState.WAITING]
        assert len(decodes) + len(preempted) == len(decoding)
        prefills = [r for r in self.scheduler.running if r.state is RequestState.PREFILL]
        assert len(prefills) <= config.max_prefills
        for g in groups:
            assert g.num_rows > 0
            assert g.num_sampled == (g.end == len(g.request.tokens))
            assert len(g.request.pages) == pages_of(g.end, 256)

    def run(self) -> None:
        while self.scheduler.num_requests:
            assert self.step().groups, "requests are open and nothing was scheduled"

    def check_idle(self) -> None:
        """Invariant 3."""
        assert not self.scheduler.waiting
        assert not self.scheduler.running
        assert self.cache.num_free_pages == self.cache.num_pages
        assert self.cache.num_free_slots == self.cache.num_slots


def expected(request: Request) -> list[int]:
    """What a request gets when it runs alone."""
    tokens = request.tokens[: request.num_prompt_tokens]
    for _ in range(request.sampling.max_tokens):
        tokens.append(next_token(tokens))
    return list(tokens[request.num_prompt_tokens :])


@dataclass
class Trace:
    """A small cache, tight budgets, requests with arrival steps, and aborts by step."""

    harness: Harness
    arrivals: list[Request]
    aborts: dict[int, str]

    @classmethod
    def random(cls, seed: int) -> Trace:
        """Long answers to short prompts, which run out of pages, among whatever else."""
        rng = random.Random(seed)
        num_seqs, num_pages = rng.randint(1, 6), rng.randint(4, 10)
        harness = Harness(
            num_pages=num_pages + 1,
            num_slots=num_seqs + 1,
            config=SchedulerConfig(
                max_num_seqs=num_seqs,
                max_num_batched_tokens=rng.randint(num_seqs, 600),
                max_prefill_rows=rng.randint(1, 400),
                max_prefills=rng.randint(1, 4),
                max_bypass=rng.randint(0, 3),
            ),
        )
        longest, arrivals = 256 * num_pages, []
        for i in range(rng.randint(1, 10)):
            num_prompt = rng.choice([rng.randint(1, 260), rng.randint(200, longest - 1)])
            max_tokens = min(rng.choice([rng.randint(1, 40), 600]), longest - num_prompt)
            arrival, priority = rng.randint(0, 100), rng.choice([0, 0, 1])
            arrivals.append(
                make(f"r{i}", num_prompt, max_tokens, arrival=arrival, priority=priority)
            )
        names = [request.request_id for request in arrivals]
        aborts = {rng.randint(0, 500): rng.choice(names) for _ in range(rng.randint(0, 3))}
        return cls(harness, sorted(arrivals, key=lambda request: request.arrival), aborts)


@settings(max_examples=40)
@given(st.integers(0, 2**32).map(Trace.random))
def test_any_trace_keeps_the_rules_and_finishes_with_the_right_tokens(trace: Trace) -> None:
    """Invariants 1 to 6, 8, 32, 33 and 34 over random loads."""
    harness, pending = trace.harness, trace.arrivals
    want = {request.request_id: expected(request) for request in pending}
    step = 0
    while pending or harness.scheduler.num_requests:
        while pending and pending[0].arrival <= step:
            harness.add(pending.pop(0))
        if step in trace.aborts and (output := harness.scheduler.abort(trace.aborts[step])):
            harness.book(output)
        if harness.scheduler.num_requests:
            assert harness.step().groups, "requests are open and nothing was scheduled"
        step += 1
    harness.check_idle()
    for name, tokens in want.items():
        if harness.finished[name].finish_reason is FinishReason.ABORT:
            assert harness.tokens[name] == tokens[: len(harness.tokens[name])]
        else:
            assert harness.finished[name].finish_reason is FinishReason.LENGTH
            assert harness.tokens[name] == tokens
    assert sum(harness.metrics.finished.values()) == len(want)


def test_decodes_run_first_and_prefill_rows_are_capped_beside_them() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=400, max_prefill_rows=100)
    harness = Harness(config=config)
    harness.add(make("short", 300, 50))
    assert harness.step().num_prefill_rows == 300
    harness.add(make("long", 700, 5, arrival=1.0))
    plan = harness.step()
    assert [(g.request.request_id, g.num_rows) for g in plan.groups] == [
        ("short", 1),
        ("long", 100),
    ]
    harness.run()


def test_a_prompt_is_cut_into_chunks_of_the_budget_and_sampled_once() -> None:
    harness = Harness(config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256))
    harness.add(make("a", 600, 1))
    plans = [harness.step() for _ in range(3)]
    assert [(p.groups[0].start, p.groups[0].num_rows) for p in plans] == [
        (0, 256),
        (256, 256),
        (512, 88),
    ]
    assert [p.groups[0].num_sampled for p in plans] == [0, 0, 1]
    harness.check_idle()


def test_a_large_request_is_passed_max_bypass_times_and_then_waited_for() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=4096, max_bypass=2)
    harness = Harness(num_pages=9, config=config)
    harness.add(make("first", 500, 300))
    harness.step()
    large = harness.add(make("large", 1500, 10, arrival=1.0))
    for i in range(4):
        harness.add(make(f"small{i}", 20, 2, arrival=2.0 + i))
    started: list[str] = []
    while large.state is RequestState.WAITING:
        started += [
            g.request.request_id for g in harness.step().groups if g.kind is RowKind.PREFILL
        ]
    assert [name for name in started if name != "first"][:3] == ["small0", "small1", "large"]
    harness.run()
    harness.check_idle()


def test_preemption_takes_the_latest_and_leaves_every_output_unchanged() -> None:
    harness = Harness(num_pages=7)
    requests = [make(f"r{i}", 240, 300, arrival=float(i)) for i in range(3)]
    want = [expected(request) for request in requests]
    for request in requests:
        harness.add(request)
    harness.run()
    harness.check_idle()
    assert [request.num_preemptions > 0 for request in requests] == [False, False, True]
    assert [harness.tokens[request.request_id] for request in requests] == want


def test_the_preempted_request_is_first_in_its_class_and_nobody_passes_it() -> None:
    harness = Harness(num_pages=6, config=SchedulerConfig(max_num_seqs=4))
    keeper, victim = make("keeper", 250, 500), make("victim", 250, 400, arrival=1.0)
    harness.add(keeper)
    harness.add(victim)
    while not victim.num_preemptions:
        harness.step()
    harness.add(make("later", 10, 5, arrival=2.0))
    harness.add(make("urgent", 10, 5, arrival=3.0, priority=-1))
    assert [r.request_id for r in harness.scheduler.waiting] == ["urgent", "victim", "later"]
    while victim.state is RequestState.WAITING:
        harness.step()
        assert "later" not in harness.finished
    harness.run()
    harness.check_idle()


def test_priority_decides_the_order_of_admission_and_of_preemption() -> None:
    harness = Harness(num_pages=7)
    requests = [make(f"r{i}", 240, 300, arrival=float(i), priority=-i) for i in range(3)]
    for request in requests:
        harness.add(request)
    assert [g.request.request_id for g in harness.step().groups] == ["r2", "r1", "r0"]
    harness.run()
    assert [request.num_preemptions > 0 for request in requests] == [True, False, False]


@pytest.mark.parametrize(
    ("token", "sampling", "reason", "stop_token_id"),
    [
        (EOS, {}, FinishReason.STOP, None),
        (EOS, {"ignore_eos": True}, None, None),
        (EOS, {"ignore_eos": True, "stop_token_ids": (EOS,)}, FinishReason.STOP, EOS),
        (7, {"stop_token_ids": (5, 7)}, FinishReason.STOP, 7),
        (7, {"stop_token_ids": (5,)}, None, None),
        (EOS, {"min_tokens": 2}, None, None),
        (7, {"min_tokens": 2, "stop_token_ids": (7,)}, None, None),
        (7, {"max_tokens": 1}, FinishReason.LENGTH, None),
        (EOS, {"max_tokens": 1}, FinishReason.STOP, None),
    ],
    ids=[
        "eos",
        "ignored eos",
        "eos as a stop id",
        "stop id",
        "other id",
        "eos too early",
        "stop id too early",
        "length",
        "eos as the last token",
    ],
)
def test_what_ends_a_request(
    token: int, sampling: dict[str, object], reason: FinishReason | None, stop_token_id: int | None
) -> None:
    harness = Harness()
    harness.add(make("a", 5, **{"max_tokens": 4, **sampling}))  # type: ignore[arg-type]
    plan = harness.scheduler.plan()
    logprobs = (TokenLogprobs(token, -1.5, 1),)
    [output] = harness.scheduler.apply(plan, [GroupResult((token,), logprobs)])
    assert output == TokenOutput("a", (token,), logprobs, reason, stop_token_id)


def test_min_tokens_counts_the_stopping_token_itself() -> None:
    harness = Harness()
    harness.add(make("a", 5, 10, min_tokens=3))
    for number in (1, 2, 3):
        [output] = harness.scheduler.apply(harness.scheduler.plan(), [GroupResult((EOS,))])
        assert (output.finish_reason is FinishReason.STOP) == (number == 3)


def test_tokens_after_the_ending_one_are_dropped() -> None:
    """A group may bring several tokens once there are drafts."""
    harness = Harness()
    harness.add(make("a", 5, 10))
    result = GroupResult((7, EOS, 9), tuple(TokenLogprobs(t, 0.0, 1) for t in (7, EOS, 9)))
    [output] = harness.scheduler.apply(harness.scheduler.plan(), [result])
    assert output.token_ids == (7, EOS)
    assert [entry.token_id for entry in output.logprobs] == [7, EOS]
    assert output.finish_reason is FinishReason.STOP


def test_an_error_ends_one_request_and_its_neighbour_goes_on() -> None:
    harness = Harness()
    bad, good = harness.add(make("bad", 5, 10)), harness.add(make("good", 5, 10))
    plan = harness.scheduler.plan()
    outputs = harness.scheduler.apply(plan, [GroupResult(error="broken"), GroupResult((9,))])
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
        ("bad", FinishReason.ERROR, "broken"),
        ("good", None, None),
    ]
    assert (bad.state, good.state) == (RequestState.FINISHED, RequestState.DECODE)
    harness.scheduler.check_integrity()


def test_every_row_of_a_prompt_logits_request_is_wanted_and_nothing_is_sampled() -> None:
    harness = Harness(config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8))
    request = make("a", 20, 0)
    request.wants_prompt_logits = True
    harness.scheduler.add(request)
    sampled = []
    outputs: list[TokenOutput] = []
    while not outputs:
        plan = harness.scheduler.plan()
        sampled.append(plan.groups[0].num_sampled)
        outputs = harness.scheduler.apply(plan, [GroupResult()])
    assert sampled == [8, 8, 4]
    assert outputs == [TokenOutput("a", finish_reason=FinishReason.LENGTH)]
    harness.check_idle()


def test_an_unknown_or_finished_id_cannot_be_aborted() -> None:
    """user-reports R14: a late event for a request that has gone is nobody's fault."""
    harness = Harness()
    harness.add(make("a", 5, 1))
    harness.run()
    assert harness.scheduler.abort("a") is None
    assert harness.scheduler.abort("never seen") is None
    harness.check_idle()
