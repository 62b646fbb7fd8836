from __future__ import annotations

import gc
import re
import weakref
from array import array

import pytest
import torch
from torch import Tensor

from leadline.cache.sizing import CacheSize
from leadline.core.request import Request, SamplingParams
from leadline.engine import runner
from leadline.engine.batch_builder import BatchBuilder
from leadline.engine.forwards import Eager
from leadline.engine.metrics import EngineMetrics
from leadline.engine.plan import GroupResult, RowGroup, RowKind, StepPlan
from leadline.engine.runner import Runner
from leadline.engine.sampler import Sampler
from leadline.kernels.debug import NonFiniteError
from leadline.models.batch import ForwardBatch
from tests.fakes import EOS, NUM_HISTORY, FakeModel, next_token, sampling

BUILDER = BatchBuilder(num_history=NUM_HISTORY, device=torch.device("cpu"))


def group(
    name: str, ids: list[int], num_sampled: int, params: SamplingParams | None = None
) -> RowGroup:
    """A whole prompt in one group; slot and page are the number that the name ends with."""
    request = Request(name, array("i", ids), len(ids), params or sampling(8), arrival=0.0)
    request.slot, request.pages = int(name[-1]), array("i", [int(name[-1])])
    return RowGroup(request, RowKind.PREFILL, 0, len(ids), len(ids), num_sampled)


def run(
    groups: list[RowGroup], model: FakeModel | None = None, metrics: EngineMetrics | None = None
) -> list[GroupResult]:
    model = model or FakeModel(CacheSize(num_pages=8, num_slots=8, page_size=256))
    forwards = Eager(model, BUILDER)
    rank = Runner(model, Sampler(EOS), forwards, metrics or EngineMetrics(), model.copy_slots)
    step = rank.launch(StepPlan(groups), None)
    rank.sample(step)
    return rank.results(step)


def test_each_group_gets_what_it_asked_for() -> None:
    scored = group("scored3", [40, 50], 2)
    scored.request.wants_prompt_logits = True
    chunk, drawn, logits, last = run(
        [group("r1", [20, 21, 22], 0), group("r2", [30], 1), scored, group("r4", [60, 61], 1)]
    )
    assert chunk == GroupResult()
    assert drawn.token_ids == (next_token([30]),)
    assert logits.logits is not None
    assert logits.logits.argmax(-1).tolist() == [next_token([40]), next_token([40, 50])]
    assert last.token_ids == (next_token([60, 61]),)


def test_logprobs_come_with_their_token() -> None:
    plain, asked = run([group("r1", [20], 1), group("r2", [30], 1, sampling(8, logprobs=2))])
    assert plain.logprobs == ()
    [entry] = asked.logprobs
    assert (entry.token_id, entry.rank, len(entry.top)) == (next_token([30]), 1, 2)


def test_a_row_without_a_valid_distribution_fails_alone() -> None:
    model = FakeModel(CacheSize(num_pages=8, num_slots=8, page_size=256), poison=14)
    metrics = EngineMetrics()
    bad, good = run([group("r1", [20, 14], 1), group("r2", [30], 1)], model, metrics)
    assert bad.error == (
        "request r1: no token can be drawn after position 1: its logits are not finite"
    )
    assert good.token_ids == (next_token([30]),)
    assert metrics.counters["corrupted_requests"] == 1


def test_c31_a_long_prompt_is_scored_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOGPROBS_BLOCK_ROWS", 4)
    sizes: list[int] = []

    class Watched(FakeModel):
        def logits(self, hidden: Tensor) -> Tensor:
            sizes.append(len(hidden))
            return super().logits(hidden)

    ids = list(range(20, 30))
    scored = group("r1", ids, 10, sampling(8, prompt_logprobs=1))
    scored.request.prompt_logprobs = [None]
    model = Watched(CacheSize(num_pages=8, num_slots=8, page_size=256))
    [result] = run([scored], model)
    assert sizes == [4, 4, 1, 1]  # the last row gives the first new token
    assert [entry.token_id for entry in result.prompt_logprobs] == ids[1:]
    assert [entry.top[0][0] for entry in result.prompt_logprobs] == [
        next_token(ids[:n]) for n in range(1, 10)
    ]
    assert result.token_ids == (next_token(ids),)


@pytest.mark.parametrize(("row", "name"), [(0, "r1"), (2, "r1"), (3, "r2"), (9, "unknown")])
def test_a_non_finite_value_is_traced_to_its_request(row: int, name: str) -> None:
    """user-reports E3 and E5: the first op, layer and request."""

    class Overflowing(FakeModel):
        def upper(self, state: object, batch: ForwardBatch) -> Tensor:
            raise NonFiniteError("swiglu", row, 7)

    first, second = run(
        [group("r1", [20, 21, 22], 1), group("r2", [30], 1)],
        Overflowing(CacheSize(num_pages=8, num_slots=8, page_size=256)),
    )
    assert first == second
    assert first.error is not None
    assert re.search(rf"op swiglu in layer 7 .* row {row} \(request {name}\)", first.error)


def test_a_step_that_is_short_of_memory_lets_go_of_what_it_had() -> None:
    """At once, not when garbage is collected: the next step needs it."""
    held: list[weakref.ref[Tensor]] = []

    class Short(FakeModel):
        def upper(self, state: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
            activations = torch.zeros(9)
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("no memory for 9 numbers")

    model = Short(CacheSize(num_pages=8, num_slots=8, page_size=256))
    rank = Runner(model, Sampler(EOS), Eager(model, BUILDER), EngineMetrics(), model.copy_slots)
    gc.disable()
    try:
        step = rank.launch(StepPlan([group("r1", [20, 21, 22], 1)]), None)
        assert held[0]() is None
    finally:
        gc.enable()
    assert step.is_short
    rank.sample(step)
    assert [result.error for result in rank.results(step)] == ["no memory for 9 numbers"]
