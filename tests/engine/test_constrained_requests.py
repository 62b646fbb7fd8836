"""Requests with grammars, budgets and scored prompts, through a whole engine."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from leadline.core.errors import BadRequest
from leadline.core.request import (
    Constraint,
    EngineRequest,
    FinishReason,
    SamplingParams,
    ThinkingBudget,
    TokenOutput,
)
from leadline.engine.constraint import ConstraintState
from leadline.engine.grammar import GrammarCompiler
from tests.fakes import EOS, FIRST_ID, VOCAB_SIZE, FakeEngine, expected_tokens, fake_engine
from tests.grammars import THINK_END, TOOL, ids_of, text_of, write_tokenizer

both_depths = pytest.mark.parametrize("asynchronous", [False, True], ids=["depth 0", "depth 1"])

OBJECT = (
    'start: %json {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, '
    '"n": {"enum": [1, 22, 333]}}, "required": ["name", "n"], "additionalProperties": false, '
    '"x-guidance": {"whitespace_flexible": false}}'
)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return GrammarCompiler(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class HeldCompiler(GrammarCompiler):
    """Compiles nothing before it is told to."""

    def __init__(self) -> None:
        self.futures: list[Future[ConstraintState]] = []

    def compile(self, constraint: Constraint) -> Future[ConstraintState]:
        self.futures.append(Future())
        return self.futures[-1]


def ask(
    name: str,
    prompt: list[int],
    max_tokens: int,
    *,
    constraint: Constraint | None = None,
    budget: ThinkingBudget | None = None,
    timeout: float | None = None,
    **params: Any,
) -> EngineRequest:
    return EngineRequest(
        name,
        tuple(prompt),
        SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens} | params),
        constraint=constraint,
        thinking_budget=budget,
        timeout_seconds=timeout,
    )


def drain(engine: FakeEngine) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {}
    engine.wait()
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.wait()
    return outputs


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def check_idle(engine: FakeEngine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_deferred) == (0, 0, 0)
    assert (stats.num_free_pages, stats.num_free_slots) == (stats.num_pages, stats.num_slots)
    engine.check_integrity()


@both_depths
def test_c42_constrained_answers_parse_beside_free_ones_that_do_not_change(
    grammars: GrammarCompiler, asynchronous: bool
) -> None:
    engine = fake_engine(asynchronous=asynchronous, grammars=grammars)
    thinking = Constraint(after=((THINK_END, OBJECT),))
    for i in range(8):
        engine.add(ask(f"free{i}", [20 + i], 30))
        engine.add(
            ask(f"json{i}", [30 + i], 200, constraint=Constraint(OBJECT), temperature=1.0, seed=i)
        )
        budget, no_end = ThinkingBudget(i, THINK_END), {EOS: -100.0}
        drawn: dict[str, Any] = {"temperature": 1.0, "seed": i, "logit_bias": no_end}
        engine.add(ask(f"think{i}", [40 + i], 200, constraint=thinking, budget=budget, **drawn))
    outputs = drain(engine)
    for i in range(8):
        assert tokens_of(outputs[f"free{i}"]) == expected_tokens([20 + i], 30)
        reasoning, _, content = text_of(tokens_of(outputs[f"think{i}"])).partition("</think>")
        assert reasoning.count("<unused") + len(re.sub("<.*?>", "", reasoning)) <= i
        for text in (content, text_of(tokens_of(outputs[f"json{i}"]))):
            assert json.loads(text.removesuffix("<eos>"))["n"] in (1, 22, 333)
    ends = {name: out[-1].finish_reason for name, out in outputs.items() if "free" not in name}
    assert set(ends.values()) == {FinishReason.STOP}
    check_idle(engine)


@both_depths
def test_item_91_a_preempted_grammar_goes_on_where_it_was(
    grammars: GrammarCompiler, asynchronous: bool
) -> None:
    engine = fake_engine(
        num_pages=7, page_size=16, asynchronous=asynchronous, grammars=grammars, num_slots=5
    )
    count = Constraint('start: "abcdefghij"{4}')
    for i in range(4):
        engine.add(ask(f"r{i}", [20 + i] * 20, 50, constraint=count))
    outputs = drain(engine)
    assert engine.stats().counters["num_preemptions"] > 0
    for out in outputs.values():
        assert text_of(tokens_of(out)) == "abcdefghij" * 4
        assert out[-1].finish_reason is FinishReason.STOP
    check_idle(engine)


@pytest.mark.parametrize(
    ("grammar", "params", "text", "reason"),
    [
        ('"ab"', {"ignore_eos": True}, "ab", FinishReason.STOP),
        ('"ab"', {"min_tokens": 5}, "ab", FinishReason.STOP),
        ('"ab"+', {"min_tokens": 5, "max_tokens": 7}, "ababab<eos>", FinishReason.STOP),
        ('"ab"*', {"ignore_eos": True}, "<eos>", FinishReason.STOP),
        ('"ab"{9}', {"max_tokens": 5}, "ababa", FinishReason.LENGTH),
    ],
    ids=["complete ignoring eos", "complete early", "min_tokens", "eos chosen", "length"],
)
def test_items_73_and_74_a_grammar_ends_an_answer(
    grammars: GrammarCompiler, grammar: str, params: dict[str, Any], text: str, reason: FinishReason
) -> None:
    engine = fake_engine(grammars=grammars)
    params = {"max_tokens": 50} | params
    constraint = Constraint(f"start: {grammar}")
    engine.add(ask("a", [20], constraint=constraint, logit_bias={EOS: 50.0}, **params))
    [outputs] = drain(engine).values()
    assert text_of(tokens_of(outputs)) == text
    assert outputs[-1].finish_reason is reason


@both_depths
def test_item_69_a_thinking_budget_forces_the_end_of_reasoning_once(asynchronous: bool) -> None:
    engine = fake_engine(asynchronous=asynchronous)
    engine.add(ask("a", [20], 9, budget=ThinkingBudget(5, THINK_END)))
    engine.add(ask("at once", [20], 3, budget=ThinkingBudget(0, THINK_END)))
    outputs = drain(engine)
    free = expected_tokens([20], 5)
    assert tokens_of(outputs["a"])[:6] == [*free, THINK_END]
    assert tokens_of(outputs["a"]).count(THINK_END) == 1
    assert tokens_of(outputs["at once"])[0] == THINK_END


@both_depths
def test_a_call_that_begins_in_reasoning_outlasts_the_thinking_budget(
    grammars: GrammarCompiler, asynchronous: bool
) -> None:
    engine = fake_engine(asynchronous=asynchronous, grammars=grammars)
    calls = Constraint(after=((TOOL, 'start: "abcdefgh"'),))
    budget = ThinkingBudget(4, THINK_END)
    engine.add(ask("a", [20], 20, constraint=calls, budget=budget, logit_bias={TOOL: 100.0}))
    [outputs] = drain(engine).values()
    assert outputs[-1].finish_reason is FinishReason.STOP, outputs[-1].error
    assert tokens_of(outputs) == [TOOL, *ids_of("abcdefgh")]


def test_bad_sequences_are_never_completed() -> None:
    engine = fake_engine()
    first, second = expected_tokens([20], 2)
    engine.add(replace(ask("a", [20], 5), bad_token_ids=((first, second), (90, 30))))
    [outputs] = drain(engine).values()
    tokens = tokens_of(outputs)
    assert tokens[0] == first
    assert tokens[1] != second


def test_item_87_a_grammar_that_fails_at_run_time_ends_its_request_alone(
    grammars: GrammarCompiler,
) -> None:
    engine = fake_engine(grammars=grammars)
    engine.add(ask("bad", [20], 9, constraint=Constraint('start: "abcdef"')))
    engine.wait()
    engine.step()
    engine.add(ask("good", [21], 9))
    [bad] = [r for r in engine.scheduler.running if r.request_id == "bad"]
    assert bad.constraint is not None
    bad.constraint.accept(ids_of("z"))  # the matcher is in error from now on
    outputs = drain(engine)
    assert outputs["bad"][-1].finish_reason is FinishReason.ERROR
    assert "its grammar failed: " in str(outputs["bad"][-1].error)
    assert len(tokens_of(outputs["good"])) == 9
    check_idle(engine)


def test_c43_a_bad_grammar_is_refused_and_counts_as_never_accepted(
    grammars: GrammarCompiler,
) -> None:
    engine = fake_engine(grammars=grammars)
    engine.add(ask("bad", [20], 9, constraint=Constraint("start: (")))
    engine.add(ask("good", [21], 2))
    outputs = drain(engine)
    [refused] = outputs["bad"]
    assert refused.refusal is not None
    assert refused.refusal.code == "invalid_schema"
    assert sum(engine.stats().finished.values()) == 1
    check_idle(engine)


def test_a_constraint_needs_a_tokenizer() -> None:
    with pytest.raises(BadRequest, match="need the package llguidance and a model with"):
        fake_engine().add(ask("a", [20], 9, constraint=Constraint('start: "a"')))


def test_a_request_is_deferred_while_its_grammar_is_compiled(grammars: GrammarCompiler) -> None:
    now, held = 100.0, HeldCompiler()
    engine = fake_engine(grammars=held, clock=lambda: now)
    constraint = Constraint('start: "abc"')
    for name, timeout in (("waits", None), ("late", 3.0), ("gone", None)):
        engine.add(ask(name, [20], 9, constraint=constraint, timeout=timeout))
    engine.add(ask("other", [21], 2))
    calls: list[str] = []
    engine.notify(lambda: calls.append("compiled"))
    assert tokens_of(drain_ready(engine)["other"]) == expected_tokens([21], 2)
    assert (engine.stats().num_waiting, engine.stats().num_deferred) == (3, 3)
    assert engine.idle_seconds() == pytest.approx(3.0)
    held.futures[2].set_running_or_notify_cancel()  # it is being compiled, and the others wait
    engine.abort("gone")
    now = 103.0
    ended = drain_ready(engine)
    assert ended["gone"][0].finish_reason is FinishReason.ABORT
    assert ended["late"][0].finish_reason is FinishReason.TIMEOUT
    assert engine.idle_seconds() is None
    assert [future.cancelled() for future in held.futures] == [False, True, False]
    for future in held.futures[::2]:
        future.set_result(grammars.compile(constraint).result())
    assert len(calls) == 3
    assert text_of(tokens_of(drain_ready(engine)["waits"])) == "abc"
    check_idle(engine)


def test_c49_a_grammar_is_not_compiled_when_all_who_asked_for_it_have_gone() -> None:
    class OneCompiler(HeldCompiler):
        def compile(self, constraint: Constraint) -> Future[ConstraintState]:
            return self.futures[0] if self.futures else super().compile(constraint)

    one = OneCompiler()
    engine = fake_engine(grammars=one)
    for name in ("a", "b"):
        engine.add(ask(name, [20], 9, constraint=Constraint('start: "abc"')))
    engine.abort("a")
    drain_ready(engine)
    assert not one.futures[0].cancelled()
    engine.abort("b")
    drain_ready(engine)
    assert one.futures[0].cancelled()
    check_idle(engine)


def drain_ready(engine: FakeEngine) -> dict[str, list[TokenOutput]]:
    """Step while there is something to do, without waiting for grammars."""
    outputs: dict[str, list[TokenOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


@both_depths
def test_c49_a_thousand_aborts_in_every_state_leave_nothing_behind(
    grammars: GrammarCompiler, asynchronous: bool
) -> None:
    """user-reports R14: late events for requests that have gone are nobody's fault."""
    rng, held = random.Random(5), HeldCompiler()
    engine = fake_engine(asynchronous=asynchronous, grammars=held, num_slots=4)
    compiled = grammars.compile(Constraint('start: "ab"+')).result()
    ends: list[Callable[[Future[ConstraintState]], None]] = [
        lambda future: future.set_result(compiled),
        lambda future: future.set_exception(BadRequest("no")),
        lambda future: future.set_exception(OSError("no process")),
    ]
    aborted: set[str] = set()
    for i in range(1000):
        constraint = rng.choice([None, Constraint('start: "ab"+')])
        engine.add(
            ask(f"r{i}", [rng.randrange(20, 90)] * rng.randint(1, 300), 50, constraint=constraint)
        )
        for _ in range(rng.randrange(3)):
            if engine.has_work:
                engine.step()
        if held.futures and rng.random() < 0.5:
            future = held.futures.pop(rng.randrange(len(held.futures)))
            if future.set_running_or_notify_cancel():
                rng.choice(ends)(future)
        for name in (f"r{rng.randint(max(0, i - 6), i)}", f"r{max(0, i - 7)}", "unknown"):
            engine.abort(name)
            aborted.add(name)
    for future in held.futures:
        if future.set_running_or_notify_cancel():
            ends[0](future)
    for i in range(1000):
        engine.abort(f"r{i}")
    drain_ready(engine)
    check_idle(engine)
    assert engine.stats().finished["abort"] > 500


# ---- prompt logprobs ----------------------------------------------------------------------------


@both_depths
@pytest.mark.parametrize("length", [1, 2, 40, 300, 700])
def test_c31_prompt_logprobs_cover_every_token_but_the_first(
    asynchronous: bool, length: int
) -> None:
    engine = fake_engine(asynchronous=asynchronous, max_num_batched_tokens=128)
    prompt = random.Random(length).choices(range(FIRST_ID, VOCAB_SIZE), k=length)
    engine.add(ask("warm", prompt, 3))  # its prefix would be a hit
    drain(engine)
    engine.add(ask("scored", prompt, 3, prompt_logprobs=2))
    engine.add(ask("only", prompt, 0, prompt_logprobs=0))
    outputs = drain(engine)
    for name, num_top in (("scored", 2), ("only", 0)):
        first, *entries = outputs[name][0].prompt_logprobs
        assert first is None
        assert outputs[name][0].num_cached_tokens == 0
        assert not any(output.prompt_logprobs for output in outputs[name][1:])
        assert [e.token_id for e in entries if e] == prompt[1:]
        for i, entry in enumerate(entries, start=1):
            assert entry is not None
            assert len(entry.top) == num_top
            [best] = expected_tokens(prompt[:i], 1)
            assert (entry.rank == 1) == (entry.token_id == best)
            assert not num_top or entry.top[0][0] == best
    assert tokens_of(outputs["scored"]) == expected_tokens(prompt, 3)
    assert tokens_of(outputs["only"]) == []
    assert outputs["only"][-1].finish_reason is FinishReason.LENGTH
    check_idle(engine)


def test_c31_a_scored_request_survives_preemption_and_says_its_prompt_once() -> None:
    engine = fake_engine(num_pages=7, page_size=16, num_slots=5, max_num_batched_tokens=24)
    for i in range(4):
        engine.add(ask(f"r{i}", [20 + i] * 20, 40, prompt_logprobs=0))
    outputs = drain(engine)
    assert engine.stats().counters["num_preemptions"] > 0
    for i in range(4):
        out = outputs[f"r{i}"]
        assert tokens_of(out) == expected_tokens([20 + i] * 20, 40)
        assert [len(output.prompt_logprobs) for output in out if output.prompt_logprobs] == [20]
