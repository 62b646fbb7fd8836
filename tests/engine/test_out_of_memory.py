"""Steps that device memory does not suffice for: fewer rows, and nobody's tokens change."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from leadline.core.errors import LeadlineError
from leadline.core.request import FinishReason
from tests.engine.test_engine import both_depths, check_idle, drain, prompt, tokens_of
from tests.engine.test_traces import MODES, Trace, check_outputs, engine_of
from tests.engine.test_traces import check_idle as check_forgotten
from tests.fakes import FakeEngine, expected_tokens, fake_engine, next_token, request

LENGTHS = (5, 300, 40, 700, 1)


def answer_all(engine: FakeEngine) -> None:
    """Prompts of several lengths, each of which gets its own tokens, and nothing is left."""
    for i, length in enumerate(LENGTHS):
        engine.add(request(f"r{i}", prompt(length, seed=i), 12))
    outputs = drain(engine)
    for i, length in enumerate(LENGTHS):
        assert tokens_of(outputs[f"r{i}"]) == expected_tokens(prompt(length, seed=i), 12)
    check_idle(engine)


def on_calls(*numbers: int) -> Callable[[int], bool]:
    """Short when the model allocates for these times, counted from 0."""
    counted = iter(range(10**9))
    return lambda num_rows: next(counted) in numbers


@both_depths
@pytest.mark.parametrize("call", range(0, 60, 7))
def test_one_shortage_anywhere_changes_no_token(asynchronous: bool, call: int) -> None:
    engine = fake_engine(asynchronous=asynchronous)
    engine.model.is_short = on_calls(call)
    answer_all(engine)
    assert engine.stats().counters["oom_steps"] == 1


@both_depths
@pytest.mark.parametrize("limit", [1, 3, 50, 400])
def test_requests_get_through_however_few_rows_fit(asynchronous: bool, limit: int) -> None:
    engine = fake_engine(asynchronous=asynchronous)
    engine.model.is_short = lambda num_rows: num_rows > limit
    answer_all(engine)
    assert engine.stats().counters["oom_steps"] > 0


@both_depths
def test_decodes_that_did_not_fit_keep_their_slots_and_are_fed_again(asynchronous: bool) -> None:
    engine = fake_engine(asynchronous=asynchronous)
    for i in range(6):
        engine.add(request(f"r{i}", prompt(9, seed=i), 20))
    first = [output for _ in range(4) for output in engine.step()]
    engine.model.is_short = lambda num_rows: num_rows > 2
    outputs = drain(engine)
    for i in range(6):
        got = tokens_of([o for o in first if o.request_id == f"r{i}"] + outputs[f"r{i}"])
        assert got == expected_tokens(prompt(9, seed=i), 20)
    counters = engine.stats().counters
    assert counters["oom_steps"] > 0
    assert counters["num_preemptions"] == 0
    check_idle(engine)


@both_depths
def test_a_request_of_which_no_row_fits_fails_alone_and_says_why(asynchronous: bool) -> None:
    engine = fake_engine(asynchronous=asynchronous)
    engine.add(request("good", prompt(300), 30))
    engine.model.is_short = lambda num_rows: engine.model.runs(13)
    engine.add(request("bad", [*prompt(40), 13], 30))
    outputs = drain(engine)
    assert tokens_of(outputs["good"]) == expected_tokens(prompt(300), 30)
    [end] = outputs["bad"]
    assert end.finish_reason is FinishReason.ERROR
    assert end.error == "request bad: no step of it fits into memory: no memory for 1 rows"
    check_idle(engine)
    engine.add(request("later", [30], 1))
    assert tokens_of(drain(engine)["later"]) == [next_token([30])]


def test_a_prompt_whose_logits_are_wanted_is_scored_again() -> None:
    engine, ids = fake_engine(), prompt(600)
    engine.model.is_short = lambda num_rows: num_rows > 100
    assert engine.prompt_logits(ids).argmax(-1).tolist() == [
        next_token(ids[: n + 1]) for n in range(len(ids))
    ]
    engine.model.is_short = lambda num_rows: True
    with pytest.raises(LeadlineError, match="no step of it fits into memory"):
        engine.prompt_logits(ids)
    check_idle(engine)


@both_depths
def test_logprobs_of_a_prompt_are_told_once_and_in_order(asynchronous: bool) -> None:
    engine, ids = fake_engine(asynchronous=asynchronous), prompt(600)
    engine.model.is_short = on_calls(7)
    engine.add(request("a", ids, 2, prompt_logprobs=0))
    scores = [entry for output in drain(engine)["a"] for entry in output.prompt_logprobs]
    assert engine.stats().counters["oom_steps"] == 1
    assert [entry.token_id for entry in scores if entry is not None] == ids[1:]


@pytest.mark.parametrize("call", [2, 5])
def test_what_is_aborted_before_its_step_is_planned_again_stays_away(call: int) -> None:
    engine = fake_engine(asynchronous=True)
    engine.model.is_short = on_calls(call)
    for name in "ab":
        engine.add(request(name, prompt(30), 8))
    while not engine.stats().counters["oom_steps"]:
        engine.step()
    engine.abort("a")
    outputs = drain(engine)
    assert outputs["a"][-1].finish_reason is FinishReason.ABORT
    assert outputs["b"][-1].finish_reason is FinishReason.LENGTH
    check_idle(engine)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", MODES)
@hypothesis_settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_any_trace_with_shortages_gives_each_request_its_own_tokens(
    mode: str, depth: int, seed: int
) -> None:
    """Memory that comes and goes: now and then so little of it that a single row fits."""
    rng, trace = random.Random(seed), Trace.random(f"short-{seed}")
    engine = engine_of(mode, trace, asynchronous=bool(depth))
    limit = 10**6

    def is_short(num_rows: int) -> bool:
        nonlocal limit
        if rng.random() < 0.05:
            limit = rng.choice([1, 2, 7, 30, 10**6])
        return num_rows > limit

    engine.model.is_short = is_short
    check_outputs(trace, trace.run(engine))
    check_forgotten(engine)
