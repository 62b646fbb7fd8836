"""Steps that are padded and replayed draw what steps draw that run op by op (6, 39 to 41).

A function that runs again on the same memory stands for a graph here; ``test_gpu`` has real ones.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.core.request import Request, SamplingParams
from leadline.engine import forwards
from leadline.engine.batch_builder import BatchBuilder
from leadline.engine.forwards import Eager, GraphLimits, GraphMode, Graphs, Replay
from leadline.engine.plan import RowGroup, RowKind
from tests.replay.harness import EXACT as assert_close
from tests.replay.harness import (
    Service,
    assert_same,
    bounded,
    exact,
    tiny_model,
    tiny_v4_model,
    tokens_of,
)

MAX_LEN = 256
OFFICIAL = (forwards.DECODE_ROWS, forwards.LOWER_ROWS, forwards.UPPER_ROWS)
DECODE, LOWER, UPPER = (1, 2, 4, 8), (8, 16, 48), (4, 8, 16)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that short requests meet, miss by one, and exceed."""
    monkeypatch.setattr(forwards, "DECODE_ROWS", DECODE)
    monkeypatch.setattr(forwards, "LOWER_ROWS", LOWER)
    monkeypatch.setattr(forwards, "UPPER_ROWS", UPPER)


class Recorder:
    """Captures by remembering; counts what is replayed, by what was captured."""

    def __init__(self) -> None:
        self.replayed: Counter[str] = Counter()

    def __call__(self, run: Callable[[], None]) -> Replay:
        run()
        name = run.func.__name__.removeprefix("_run_")  # type: ignore[attr-defined]

        def replay() -> None:
            self.replayed[name] += 1
            run()

        return replay


USED = {
    GraphMode.DECODE: {"decode"},
    GraphMode.LOWER: {"decode", "lower"},
    GraphMode.ALL: {"decode", "lower", "upper"},
}
KINDS: dict[str, Callable[..., Service]] = {
    "bounded": lambda **options: bounded(tiny_model(), **options),
    "exact": lambda **options: exact(tiny_model(), **options),
    "v4": lambda **options: exact(tiny_v4_model(), **options),
}


def traffic(make: Callable[..., Service], **options: Any) -> list[Any]:
    """Turns of several sessions side by side: prompts, hits, decodes and mixtures of them."""
    service = make(max_model_len=MAX_LEN, num_seqs=8, **options)
    texts = [tokens_of(length, seed=length) for length in (1, 7, 30, 47, 61, 90)]
    answers = []
    for turn in range(2):
        found = service.ask(*texts, max_tokens=5)
        answers += found
        texts = [a.text + tokens_of(3 + 9 * turn, seed=i) for i, a in enumerate(found)]
    return answers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["one_at_a_time", "ahead"])
@pytest.mark.parametrize("mode", [GraphMode.DECODE, GraphMode.LOWER, GraphMode.ALL])
def test_39_the_same_tokens_with_graphs_and_without(
    mode: GraphMode, asynchronous: bool, kind: str
) -> None:
    recorder = Recorder()
    options: dict[str, Any] = {"max_num_batched_tokens": 64, "asynchronous": asynchronous}
    wanted = traffic(KINDS[kind], **options)
    got = traffic(KINDS[kind], graphs=mode, capture=recorder, **options)
    for answer, want in zip(got, wanted, strict=True):
        assert_same(answer, want)
        assert answer.cached == want.cached
    assert set(recorder.replayed) == USED[mode]


class Bench:
    """Steps on caches of their own, which start alike."""

    def __init__(self) -> None:
        self.service = bounded(tiny_model(), num_pages=40, num_seqs=9)
        self.model, self.pool = self.service.model, self.service.pool
        self.builder = BatchBuilder(num_history=3, device=torch.device("cpu"))
        for tensor in self.tensors:
            if tensor.is_floating_point():
                tensor.normal_()
            else:
                tensor.random_(0, 100)

    @property
    def tensors(self) -> list[Tensor]:
        pool = self.pool
        fields = [*pool.kv.values(), *pool.index.values(), *pool.window]
        parts = [part for f in fields for part in (f.values, f.scales) if part is not None]
        return [*parts, *pool.open_groups.values()]

    def graphs(self, mode: GraphMode = GraphMode.ALL) -> Graphs:
        limits = GraphLimits(8, 64, MAX_LEN, self.model.config.vocab_size)
        made = Graphs(self.model, self.builder, Recorder(), mode, limits, self.service.size)
        kept = [tensor.clone() for tensor in self.tensors]
        self.model.bind_cache(self.pool)
        made.capture()
        for tensor, before in zip(self.tensors, kept, strict=True):
            tensor.copy_(before)
        return made

    def run(self, how: Eager | Graphs, groups: list[RowGroup]) -> tuple[Tensor, list[Tensor]]:
        """Hidden rows of the step, and what it leaves in the caches but for staged rows."""
        kept = [tensor.clone() for tensor in self.tensors]
        self.model.bind_cache(self.pool)
        with torch.inference_mode():
            _, run = how.prepare(groups)
            hidden = run()[: sum(g.num_sampled for g in groups)].clone()
        found = [tensor[: self.pool.num_slots].clone() for tensor in self.tensors]
        for tensor, before in zip(self.tensors, kept, strict=True):
            tensor.copy_(before)
        return hidden, found

    def group(self, number: int, start: int, rows: int, upper: int, sampled: int) -> RowGroup:
        """Of a request with slot and pages of its own."""
        request = Request(
            str(number),
            array("i", tokens_of(start + rows, seed=number)),
            start + rows,
            SamplingParams(),
            arrival=0.0,
        )
        request.slot = 1 + number
        request.pages = array("i", range(1 + 4 * number, 5 + 4 * number))
        request.floor_up = max(0, start - 3)
        return RowGroup(request, RowKind.PREFILL, start, rows, upper, sampled)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8])
def test_39_decodes_of_every_size_equal_eager_ones(bench: Bench, count: int) -> None:
    """As near as products of other sizes are; caches too, where padding writes nowhere."""
    groups = [bench.group(i, 11 + 5 * i, 1, 1, 1) for i in range(count)]
    hidden, caches = bench.run(bench.graphs(), groups)
    wanted, wanted_caches = bench.run(Eager(bench.model, bench.builder), groups)
    assert torch.isfinite(hidden).all()
    assert_close(hidden, wanted)
    assert_close(caches, wanted_caches)


# Rows of two prompts and how many of them run the upper half.
STEPS = [(3, 4, 3, 0), (4, 4, 1, 4), (5, 4, 5, 4), (15, 1, 8, 1), (16, 1, 0, 0), (30, 18, 15, 1)]
STEPS += [(30, 19, 16, 1), (40, 20, 0, 12), (44, 20, 8, 9)]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_39_prompts_of_every_size_equal_eager_ones(
    bench: Bench, step: tuple[int, int, int, int]
) -> None:
    """Sizes just met, just missed and exceeded, by either half; beside a decode row."""
    first, second, upper_of_first, upper_of_second = step
    groups = [
        bench.group(0, 9, first, upper_of_first, min(1, upper_of_first)),
        bench.group(1, 0, second, upper_of_second, min(1, upper_of_second)),
        bench.group(2, 33, 1, 1, 1),
    ]
    hidden, caches = bench.run(bench.graphs(), groups)
    wanted, wanted_caches = bench.run(Eager(bench.model, bench.builder), groups)
    assert_close(hidden, wanted)
    assert_close(caches, wanted_caches)


def test_40_what_padding_holds_changes_no_bit(bench: Bench) -> None:
    """The same step behind another one, whose rows are still in the memory of the graphs."""
    graphs = bench.graphs()
    groups = [bench.group(i, 20 + i, 1, 1, 1) for i in range(5)]
    first, caches = bench.run(graphs, groups)
    bench.run(graphs, [bench.group(i, 40 - i, 1, 1, 1) for i in range(8)])
    bench.run(graphs, [bench.group(3, 0, 47, 12, 1)])
    again, caches_again = bench.run(graphs, groups)
    assert torch.equal(first, again)
    assert all(map(torch.equal, caches, caches_again))


def test_padding_neither_reads_nor_counts(bench: Bench) -> None:
    """NaN in the null page and in slot 0 reaches nobody."""
    graphs = bench.graphs()
    groups = [bench.group(i, 20 + i, 1, 1, 1) for i in range(3)]
    wanted, _ = bench.run(graphs, groups)
    for ring in bench.pool.open_groups.values():
        ring[0] = torch.nan
    for field in (*bench.pool.window, *bench.pool.kv.values(), *bench.pool.index.values()):
        field.values[0] = 0x7F
        if field.scales is not None:
            field.scales[0] = 0xFF
    hidden, _ = bench.run(graphs, groups)
    assert torch.equal(hidden, wanted)


def test_steps_beyond_the_largest_graph_run_op_by_op(bench: Bench) -> None:
    recorder = Recorder()
    limits = GraphLimits(12, 64, MAX_LEN, bench.model.config.vocab_size)
    graphs = Graphs(bench.model, bench.builder, recorder, GraphMode.ALL, limits, bench.service.size)
    bench.model.bind_cache(bench.pool)
    graphs.capture()
    recorder.replayed.clear()
    bench.run(graphs, [bench.group(i, 20, 1, 1, 1) for i in range(9)])
    assert not recorder.replayed["decode"]
    bench.run(graphs, [bench.group(0, 0, 49, 17, 1)])
    assert set(recorder.replayed) <= {"lower", "upper"}
    recorder.replayed.clear()
    bench.run(graphs, [bench.group(0, 0, 60, 17, 1)])
    assert not recorder.replayed


def test_graphs_are_no_more_than_steps_can_use(bench: Bench) -> None:
    def sizes(mode: GraphMode, max_num_seqs: int, rows: int) -> list[int]:
        limits = GraphLimits(max_num_seqs, rows, MAX_LEN, 500)
        made = Graphs(bench.model, bench.builder, Recorder(), mode, limits, bench.service.size)
        bench.model.bind_cache(bench.pool)
        made.capture()
        return [len(made._decode), len(made._lower), len(made._upper)]

    assert sizes(GraphMode.ALL, 3, 20) == [3, 2, 3]
    assert sizes(GraphMode.ALL, 8, 8) == [4, 1, 2]
    assert sizes(GraphMode.DECODE, 1, 64) == [1, 0, 0]


def test_official_sizes_are_ascending_and_few() -> None:
    for sizes in OFFICIAL:
        assert list(sizes) == sorted(set(sizes))
        assert len(sizes) < 32
