from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field

import pytest

from leadline.cache.manager import CacheManager
from leadline.cache.sizing import CacheSize
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
from leadline.engine.plan import GroupResult, RowKind, StepPlan
from tests.checks import CheckedScheduler
from tests.fakes import BOUNDED

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
    session_key: str | None = None,
    **sampling: object,
) -> Request:
    prompt = array("i", random.Random(name).choices(range(2, 97), k=num_prompt))
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Request(
        name, prompt, num_prompt, params, arrival, priority=priority, session_key=session_key
    )


@dataclass
class Harness:
    """A scheduler with a model that answers at once, and every rule of a step checked."""

    num_pages: int = 9
    num_slots: int = 5
    page_size: int = 256
    config: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512)
    )

    now: float = 0.0

    def __post_init__(self) -> None:
        self.cache = CacheManager(CacheSize(self.num_pages, self.num_slots, self.page_size))
        self.metrics = EngineMetrics()
        self.scheduler = CheckedScheduler(
            self.config,
            self.cache,
            self.metrics,
            BOUNDED,
            eos_token_id=EOS,
            clock=lambda: self.now,
        )
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
        plan = self.plan()
        self.apply(plan)
        return plan

    def apply(self, plan: StepPlan) -> None:
        results = [
            GroupResult(token_ids=(next_token(g.request.tokens),) if g.num_sampled else ())
            for g in plan.groups
        ]
        for output in self.scheduler.apply(plan, results):
            self.book(output)

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        return plan

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
        (256, 216),  # up to where the upper half begins
        (472, 128),
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
    order = harness.scheduler.waiting.in_order(harness.now, Counter())
    assert [r.request_id for r in order] == ["urgent", "victim", "later"]
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


def test_a_higher_class_does_not_wait_for_the_rows_of_a_lower_one() -> None:
    """Invariant 38: neither to be admitted nor for the rest of a long prompt."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=100, max_prefill_rows=100)
    harness = Harness(config=config)
    harness.add(make("long", 1000, 2, priority=1))
    harness.step()
    harness.add(make("urgent", 130, 2, arrival=1.0))
    rows = [
        [(group.request.request_id, group.num_rows) for group in harness.step().groups]
        for _ in range(2)
    ]
    assert rows == [[("urgent", 2), ("long", 98)], [("urgent", 100)]]
    harness.run()


def test_waiting_improves_the_class() -> None:
    """Ageing: an old request of a low class comes before a new one of a higher class."""
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=512, priority_aging_seconds=10)
    harness = Harness(num_slots=2, config=config)
    harness.add(make("running", 10, 5))
    harness.step()
    harness.add(make("low", 10, 1, arrival=0.0, priority=2))
    harness.add(make("high", 10, 1, arrival=20.0))
    harness.now = 29.0
    order = harness.scheduler.waiting.in_order(harness.now, Counter())
    assert [request.request_id for request in order] == ["low", "high"]
    harness.now = 19.0
    order = harness.scheduler.waiting.in_order(harness.now, Counter())
    assert [request.request_id for request in order] == ["high", "low"]
    harness.run()
    assert list(harness.finished) == ["running", "high", "low"]


def test_a_session_with_much_running_lets_others_in_first() -> None:
    harness = Harness(
        num_slots=4, config=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=512)
    )
    for i in range(4):
        harness.add(make(f"greedy{i}", 10, 9, arrival=float(i), session_key="greedy"))
    harness.add(make("modest", 10, 9, arrival=9.0, session_key="modest"))
    harness.add(make("nobody", 10, 9, arrival=10.0))
    harness.step()
    assert [r.request_id for r in harness.scheduler.running] == ["greedy0", "greedy1", "greedy2"]
    harness.scheduler.abort("greedy0")
    harness.step()
    assert [r.request_id for r in harness.scheduler.running] == ["greedy1", "greedy2", "modest"]
    harness.scheduler.abort("greedy1")
    harness.step()
    assert "nobody" in [r.request_id for r in harness.scheduler.running]


def test_long_prompts_share_a_step_under_a_threshold_and_take_turns() -> None:
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=100, long_prefill_threshold=40, max_prefills=4
    )
    harness = Harness(config=config)
    for name in "abc":
        harness.add(make(name, 200, 2))
    plans = [harness.step() for _ in range(3)]
    rows = [{group.request.request_id: group.num_rows for group in plan.groups} for plan in plans]
    assert rows == [
        {"a": 40, "b": 40, "c": 20},
        {"c": 40, "a": 32, "b": 28},  # up to where the upper half of a begins
        {"c": 12, "b": 4, "a": 40},
    ]
    progress = [request.fed for request in harness.scheduler.running]
    assert max(progress) - min(progress) <= 40
    harness.run()


def test_no_more_prompts_than_max_prefills_are_under_way() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_prefills=2)
    harness = Harness(config=config)
    for name in "abc":
        harness.add(make(name, 50, 1))
    assert [group.request.request_id for group in harness.step().groups] == ["a", "b"]
    harness.run()


def test_a_request_ends_at_its_deadline_wherever_it_is() -> None:
    harness = Harness(
        num_slots=2, config=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16)
    )
    for name in ("decoding", "waiting", "patient"):
        harness.add(make(name, 10, 5)).deadline = None if name == "patient" else 2.0
    harness.step()
    harness.now = 1.9
    assert harness.scheduler.expire() == []
    harness.now = 2.0
    late = harness.scheduler.expire()
    assert [(output.request_id, output.finish_reason) for output in late] == [
        ("decoding", FinishReason.TIMEOUT),
        ("waiting", FinishReason.TIMEOUT),
    ]
    assert late[0].error == "request decoding: its deadline passed after 2.0 s"
    for output in late:
        harness.book(output)
    harness.run()
    harness.check_idle()


def test_a_step_in_flight_is_booked_before_somebody_is_preempted() -> None:
    """cache-and-scheduling 5.9, rule 5."""
    harness = Harness(num_pages=7, page_size=16)  # six pages for two requests that want four each
    requests = [harness.add(make(name, 25, 30, arrival=i)) for i, name in enumerate("ab")]
    previous, waited = harness.plan(), []
    while not requests[1].num_preemptions:
        plan = harness.scheduler.plan()
        waited.append(plan is None)
        harness.apply(previous)
        previous = plan or harness.plan()  # one of a preempted request is refused here
    assert waited == [False] * (len(waited) - 1) + [True]
    harness.apply(previous)
    harness.run()
    assert [harness.tokens[r.request_id] for r in requests] == [expected(r) for r in requests]
    harness.check_idle()


def test_a_result_for_an_earlier_life_changes_nothing() -> None:
    """Invariant 35: the generation tells."""
    harness = Harness()
    request = harness.add(make("a", 5, 9))
    plan = harness.plan()
    output = harness.scheduler.abort("a")
    assert output is not None
    tokens = list(request.tokens)
    assert harness.scheduler.apply(plan, [GroupResult((7,))]) == []
    assert list(request.tokens) == tokens
    harness.check_idle()


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
    plan = harness.plan()
    logprobs = (TokenLogprobs(token, -1.5, 1),)
    [output] = harness.scheduler.apply(plan, [GroupResult((token,), logprobs)])
    assert output == TokenOutput("a", (token,), logprobs, reason, stop_token_id)


def test_min_tokens_counts_the_stopping_token_itself() -> None:
    harness = Harness()
    harness.add(make("a", 5, 10, min_tokens=3))
    for number in (1, 2, 3):
        [output] = harness.scheduler.apply(harness.plan(), [GroupResult((EOS,))])
        assert (output.finish_reason is FinishReason.STOP) == (number == 3)


def test_tokens_after_the_ending_one_are_dropped() -> None:
    """A group may bring several tokens once there are drafts."""
    harness = Harness()
    harness.add(make("a", 5, 10))
    result = GroupResult((7, EOS, 9), tuple(TokenLogprobs(t, 0.0, 1) for t in (7, EOS, 9)))
    [output] = harness.scheduler.apply(harness.plan(), [result])
    assert output.token_ids == (7, EOS)
    assert [entry.token_id for entry in output.logprobs] == [7, EOS]
    assert output.finish_reason is FinishReason.STOP


def test_an_error_ends_one_request_and_its_neighbour_goes_on() -> None:
    harness = Harness()
    bad, good = harness.add(make("bad", 5, 10)), harness.add(make("good", 5, 10))
    plan = harness.plan()
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
        plan = harness.plan()
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
