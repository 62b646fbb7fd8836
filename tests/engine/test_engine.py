from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from leadline.core.errors import BadRequest, EngineOverloaded, LeadlineError
from leadline.core.request import EngineRequest, FinishReason, Request, TokenOutput
from leadline.engine.engine import Engine
from leadline.engine.sampler import Draw, Sampler
from tests.fakes import (
    EOS,
    FIRST_ID,
    VOCAB_SIZE,
    expected_tokens,
    fake_engine,
    next_token,
    request,
)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(FIRST_ID, VOCAB_SIZE), k=num_tokens)


def drain(
    engine: Engine, between: Callable[[int], None] = lambda step: None
) -> dict[str, list[TokenOutput]]:
    """Step until nothing is left, checking the books; the outputs by request."""
    outputs: dict[str, list[TokenOutput]] = {}
    step = 0
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
        between(step)
        step += 1
    return outputs


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def check_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert (stats.num_free_pages, stats.num_free_slots) == (stats.num_pages, stats.num_slots)


both_depths = pytest.mark.parametrize("asynchronous", [False, True], ids=["depth 0", "depth 1"])


def mixed_load() -> list[EngineRequest]:
    """Prompts of very different lengths, short and long answers."""
    rng = random.Random(1)
    return [
        request(f"r{i}", prompt(rng.choice([1, 3, 40, 255, 256, 700]), seed=i), rng.randint(1, 60))
        for i in range(12)
    ]


@both_depths
def test_continuous_batching_gives_each_request_what_it_gets_alone(asynchronous: bool) -> None:
    engine = fake_engine(asynchronous=asynchronous, max_num_batched_tokens=64, max_prefill_rows=48)
    load = mixed_load()
    for item in load:
        engine.add(item)
    outputs = drain(engine)
    for item in load:
        want = expected_tokens(item.prompt_token_ids, item.sampling.max_tokens)
        assert tokens_of(outputs[item.request_id]) == want
        assert outputs[item.request_id][-1].finish_reason is FinishReason.LENGTH
        assert all(output.finish_reason is None for output in outputs[item.request_id][:-1])
        alone = fake_engine(max_num_batched_tokens=64)
        alone.add(item)
        assert tokens_of(drain(alone)[item.request_id]) == want
    check_idle(engine)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 127, 128, 255, 256, 257, 600])
def test_a_prompt_may_be_split_anywhere(rows: int) -> None:
    """user-reports E2 and E4: chunks that end inside a group, at a page, before the last token."""
    engine = fake_engine(num_slots=2, max_num_batched_tokens=rows)
    ids = prompt(601)
    engine.add(request("a", ids, 4))
    assert tokens_of(drain(engine)["a"]) == expected_tokens(ids, 4)
    lower, tail = 601 - 128, 128  # a chunk stops where the upper half begins
    assert engine.stats().counters["steps"] == -(-lower // rows) + -(-tail // rows) + 3


@both_depths
def test_item_91_preemption_keeps_every_output_and_emits_no_token_twice(asynchronous: bool) -> None:
    engine = fake_engine(asynchronous=asynchronous, num_pages=7)
    load = [request(f"r{i}", prompt(240, seed=i), 300) for i in range(3)]
    for item in load:
        engine.add(item)
    outputs = drain(engine)
    assert engine.stats().counters["num_preemptions"] > 0
    for item in load:
        assert tokens_of(outputs[item.request_id]) == expected_tokens(item.prompt_token_ids, 300)
    check_idle(engine)


@both_depths
def test_an_abort_at_any_step_frees_everything_and_harms_nobody(asynchronous: bool) -> None:
    """user-reports R14, invariant 8."""
    load = [request(f"r{i}", prompt(size, seed=i), 12) for i, size in enumerate((90, 300, 40, 500))]
    for name in ("r0", "r1", "r3"):
        for at in range(0, 30, 2):
            engine = fake_engine(
                asynchronous=asynchronous, num_pages=5, num_slots=4, max_num_batched_tokens=64
            )
            for item in load:
                engine.add(item)

            def abort(step: int, at: int = at, name: str = name, engine: Engine = engine) -> None:
                if step == at:
                    engine.abort(name)

            outputs = drain(engine, abort)
            engine.abort(name)
            check_idle(engine)
            for item in load:
                got = tokens_of(outputs[item.request_id])
                want = expected_tokens(item.prompt_token_ids, 12)
                last = outputs[item.request_id][-1]
                if last.finish_reason is FinishReason.ABORT:
                    assert item.request_id == name
                    assert got == want[: len(got)]
                else:
                    assert got == want


def test_an_abort_of_an_unknown_id_is_ignored() -> None:
    engine = fake_engine()
    engine.abort("never seen")
    assert not engine.has_work


@both_depths
def test_a_step_that_raises_ends_its_requests_and_not_the_engine(
    caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    engine = fake_engine(fail_on=13, asynchronous=asynchronous)
    engine.add(request("bad", [5, 13, 7], 4))
    engine.add(request("beside", [5, 6], 4))
    [bad, beside] = engine.step() + (engine.step() if asynchronous else [])
    for output in (bad, beside):
        assert output.finish_reason is FinishReason.ERROR
        assert output.error == "the forward pass failed: RuntimeError: id 13 cannot be run"
    assert "its requests end: bad, beside" in caplog.text
    check_idle(engine)
    engine.add(request("next", [5, 6], 1))
    assert tokens_of(drain(engine)["next"]) == [next_token([5, 6])]


@both_depths
def test_a_step_that_raises_ends_nobody_of_the_step_after_it(asynchronous: bool) -> None:
    engine = fake_engine(fail_on=13, asynchronous=asynchronous)
    engine.add(request("bad", [5, 13, 7], 4))
    engine.step()
    engine.add(request("after", [5, 6], 4))
    assert tokens_of(drain(engine)["after"]) == expected_tokens([5, 6], 4)
    check_idle(engine)


class FlakySampler(Sampler):
    """Raises once."""

    has_failed = False

    def launch(self, logits: Tensor, requests: Sequence[Request]) -> Draw:
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("no tokens today")
        return super().launch(logits, requests)


@both_depths
def test_a_sampler_that_raises_ends_the_requests_of_its_step_and_no_other(
    asynchronous: bool,
) -> None:
    engine = fake_engine(sampler=FlakySampler(EOS), asynchronous=asynchronous)
    engine.add(request("bad", [5, 7], 4))
    outputs = engine.step()
    engine.add(request("after", [5, 6], 4))
    rest = drain(engine)
    [bad] = outputs + rest.pop("bad", [])
    assert bad.error == "the forward pass failed: RuntimeError: no tokens today"
    assert tokens_of(rest["after"]) == expected_tokens([5, 6], 4)
    check_idle(engine)


@both_depths
def test_nan_logits_end_their_own_request_by_name_and_no_other(asynchronous: bool) -> None:
    engine = fake_engine(asynchronous=asynchronous, poison=13)
    engine.add(request("good", [5, 6], 3))
    engine.add(request("bad", [5, 13], 3))
    outputs = drain(engine)
    assert tokens_of(outputs["good"]) == expected_tokens([5, 6], 3)
    [output] = outputs["bad"]
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    assert "request bad: no token can be drawn after position 1" in output.error
    check_idle(engine)


@both_depths
def test_prompt_logits_are_those_of_every_position_in_any_chunks(asynchronous: bool) -> None:
    engine = fake_engine(asynchronous=asynchronous, max_num_batched_tokens=50)
    ids = prompt(333)
    logits = engine.prompt_logits(ids)
    assert logits.shape == (333, VOCAB_SIZE)
    assert logits.dtype == np.float32
    assert logits.argmax(-1).tolist() == [next_token(ids[: i + 1]) for i in range(333)]
    check_idle(engine)


@both_depths
def test_prompt_logits_run_beside_others_who_miss_no_output(asynchronous: bool) -> None:
    engine = fake_engine(asynchronous=asynchronous, max_num_batched_tokens=16)
    engine.add(request("a", [5, 6, 7], 6))
    engine.prompt_logits(prompt(100))
    assert tokens_of(drain(engine)["a"]) == expected_tokens([5, 6, 7], 6)


def test_prompt_logits_of_a_failing_forward_raise() -> None:
    engine = fake_engine(fail_on=13)
    with pytest.raises(LeadlineError, match="id 13 cannot be run"):
        engine.prompt_logits([5, 13])
    with pytest.raises(BadRequest, match="the prompt is empty"):
        engine.prompt_logits([])
    engine.pause(True)
    with pytest.raises(EngineOverloaded, match="paused"):
        engine.prompt_logits([5])


def test_a_paused_engine_keeps_its_requests_and_still_aborts() -> None:
    engine = fake_engine()
    engine.add(request("a", [5, 6], 5))
    engine.add(request("b", [5, 7], 5))
    engine.step()
    engine.pause(True)
    assert not engine.has_work
    assert engine.step() == []
    engine.abort("b")
    assert engine.has_work
    assert [output.request_id for output in engine.step()] == ["b"]
    engine.pause(False)
    assert tokens_of(drain(engine)["a"]) == expected_tokens([5, 6], 5)[1:]


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = fake_engine()
    engine.add(request("a", [5], 2))
    with pytest.raises(BadRequest, match="request id 'a' is in use"):
        engine.add(request("a", [6], 2))
    drain(engine)
    engine.add(request("a", [6], 2))


def test_a_full_queue_refuses_and_recovers() -> None:
    engine = fake_engine(num_slots=2, max_num_queued_reqs=2)
    engine.add(request("a", [5], 2))
    engine.add(request("b", [5], 2))
    with pytest.raises(EngineOverloaded, match="2 requests are running or waiting"):
        engine.add(request("c", [5], 2))
    drain(engine)
    engine.add(request("c", [5], 2))


@both_depths
def test_a_request_that_takes_too_long_fails_and_frees_everything(asynchronous: bool) -> None:
    now = 100.0
    engine = fake_engine(asynchronous=asynchronous, num_slots=2, clock=lambda: now)
    engine.add(replace(request("late", [5, 6], 50), timeout_seconds=3.0))
    engine.add(replace(request("queued", [5, 6], 50), timeout_seconds=3.5))
    engine.add(request("patient", [5, 6], 3))
    engine.step()
    now = 103.1
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs["late"].finish_reason is FinishReason.TIMEOUT
    assert outputs["late"].error == "request late: its deadline passed after 3.1 s"
    now = 104.0
    rest = drain(engine)
    assert rest["queued"][-1].finish_reason is FinishReason.TIMEOUT
    assert tokens_of(rest["patient"]) == expected_tokens([5, 6], 3)
    check_idle(engine)


@pytest.mark.parametrize("checks", [False, True])
def test_the_books_are_proved_after_every_step_where_that_is_wanted(
    checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine(checks_integrity=checks)
    calls = []
    monkeypatch.setattr(engine, "check_integrity", lambda: calls.append(1))
    engine.add(request("a", [5, 6], 3))
    while engine.has_work:
        engine.step()
    assert len(calls) == (3 if checks else 0)


def test_broken_books_are_noticed() -> None:
    engine = fake_engine(checks_integrity=True)
    engine.add(request("a", [5, 6], 3))
    engine.step()
    [live] = engine.scheduler.running
    live.pages.append(live.pages[0])
    with pytest.raises(AssertionError, match="page"):
        engine.check_integrity()


def test_item_89_a_prompt_one_below_the_context_generates_exactly_one_token() -> None:
    engine = fake_engine(max_model_len=64)
    ids = prompt(63)
    engine.add(request("a", ids, 50))
    [output] = drain(engine)["a"]
    assert output.token_ids == (next_token(ids),)
    assert output.finish_reason is FinishReason.LENGTH


def test_counters_are_the_sums_over_requests() -> None:
    """Invariant 36, without a prefix cache: computed = prompt."""
    engine = fake_engine()
    load = mixed_load()
    for item in load:
        engine.add(item)
    outputs = drain(engine)
    stats = engine.stats()
    prompts = sum(len(item.prompt_token_ids) for item in load)
    assert stats.counters["prompt_tokens"] == stats.counters["computed_tokens"] == prompts
    assert stats.counters["generation_tokens"] == sum(len(tokens_of(o)) for o in outputs.values())
    assert stats.finished == dict.fromkeys(FinishReason, 0) | {"length": len(load)}
    assert set(stats.step_seconds) == {"schedule", "build", "forward", "sample"}
    assert engine.reset_prefix_cache()


class SeedRecorder(Sampler):
    """Notes the seed of every request it samples for."""

    def __init__(self) -> None:
        super().__init__(EOS)
        self.seeds: dict[str, int] = {}

    def launch(self, logits: Tensor, requests: Sequence[Request]) -> Draw:
        self.seeds |= {live.request_id: live.seed for live in requests}
        return super().launch(logits, requests)


def test_requests_without_a_seed_get_different_ones_and_those_with_one_keep_it() -> None:
    sampler = SeedRecorder()
    engine = fake_engine(sampler=sampler)
    for name, seed in (("a", None), ("b", None), ("c", -7)):
        engine.add(request(name, [5], 1, seed=seed))
    drain(engine)
    assert sampler.seeds["a"] != sampler.seeds["b"]
    assert sampler.seeds["c"] == -7
