"""The largest step and graphs, on a real model; a function that runs again stands for a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from leadline.cache.layout import cache_layout
from leadline.core.errors import ConfigError, LeadlineError
from leadline.engine import forwards
from leadline.engine.batch_builder import BatchBuilder
from leadline.engine.forwards import GraphLimits, GraphMode, Replay
from leadline.engine.launch import build_engine
from leadline.engine.rehearsal import Rehearsal
from leadline.kernels import preparation
from leadline.kernels.registry import REFERENCE
from leadline.models.batch import ForwardBatch
from leadline.models.deepseek_v41.model import DeepseekV41
from tests.engine.test_launch import TINY, generate
from tests.replay.harness import PAGE, tiny_model

LIMITS = GraphLimits(max_num_seqs=5, max_num_batched_tokens=40, max_len=100, vocab_size=500)


@dataclass
class Meter:
    """A device on which each graph takes what is said."""

    of_graphs: list[int] = field(default_factory=list)
    held: int = 0
    total: int = 2**30
    num_runs: int = 0

    def in_use(self) -> int:
        return self.held

    def added_by(self, run: Callable[[], None]) -> int:
        run()
        self.num_runs += 1
        return 2**27

    def capture(self, run: Callable[[], None]) -> Replay:
        run()
        self.held += self.of_graphs.pop(0)
        return run


def rehearsal(
    mode: GraphMode = GraphMode.OFF, meter: Meter | None = None, limits: GraphLimits = LIMITS
) -> Rehearsal:
    model = tiny_model()
    return Rehearsal(
        model,
        REFERENCE,
        BatchBuilder(num_history=3, device=torch.device("cpu")),
        cache_layout(model.config, block_size=PAGE),
        model.wide,
        limits,
        mode,
        new_capture=lambda: (meter or Meter()).capture,
    )


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[ForwardBatch]:
    """The batches that were run."""
    batches: list[ForwardBatch] = []
    lower = DeepseekV41.lower

    def watched(self: DeepseekV41, batch: ForwardBatch) -> Any:
        batches.append(batch)
        return lower(self, batch)

    monkeypatch.setattr(DeepseekV41, "lower", watched)
    return batches


@pytest.mark.parametrize(
    ("limits", "rows"),
    [
        (LIMITS, [36, 1, 1, 1, 1]),
        (replace(LIMITS, max_len=20), [20, 17, 1, 1, 1]),
        (replace(LIMITS, max_num_batched_tokens=5), [1, 1, 1, 1, 1]),
        (replace(LIMITS, max_len=7), [7, 7, 7, 7, 7]),
    ],
    ids=["a long prompt", "shorter than a step", "decodes only", "all of them short"],
)
def test_the_step_has_all_rows_requests_and_positions_that_there_may_be(
    fed: list[ForwardBatch], limits: GraphLimits, rows: list[int]
) -> None:
    rehearsal(limits=limits).step()
    [batch] = fed
    assert batch.q_off.diff().tolist() == rows
    assert len(batch.rows_upper) == len(batch.ids) == sum(rows)
    assert batch.max_len == limits.max_len
    assert batch.page_table.shape == (5, -(-limits.max_len // PAGE))


def test_its_tokens_are_drawn_and_a_prompt_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = DeepseekV41.logits

    def watched(self: DeepseekV41, hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return original(self, hidden)

    monkeypatch.setattr(DeepseekV41, "logits", watched)
    rehearsal().step()
    assert sizes == [35, 5]


def test_a_step_that_is_short_of_memory_or_fails_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, raised in (
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError),
        (RuntimeError("a kernel"), LeadlineError),
    ):
        monkeypatch.setattr(DeepseekV41, "upper", _raising(error))
        with pytest.raises(raised, match=str(error)):
            rehearsal().step()


def _raising(error: Exception) -> Callable[..., None]:
    def upper(*_: object) -> None:
        raise error

    return upper


def test_graphs_take_what_those_tried_do_and_the_others_what_a_small_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwards, "LOWER_ROWS", (8, 16, 24, 32))
    monkeypatch.setattr(forwards, "UPPER_ROWS", (8, 16, 24))
    monkeypatch.setattr(forwards, "DECODE_ROWS", (1, 2, 3, 4, 8))
    meter = Meter(of_graphs=[1000, 7, 200, 5, 100, 6])
    assert rehearsal(GraphMode.ALL, meter).graph_bytes(meter) == 1318 + (12 - 6) * 7
    meter = Meter(of_graphs=[100, 6])
    assert rehearsal(GraphMode.DECODE, meter).graph_bytes(meter) == 106 + (5 - 2) * 6
    assert rehearsal(GraphMode.OFF).graph_bytes(meter) == 0


@pytest.mark.parametrize("model", ["tiny-window128", "tiny-v4"])
def test_a_device_that_is_measured_gets_its_cache_from_what_is_left(
    caplog: pytest.LogCaptureFixture, model: str
) -> None:
    caplog.set_level("INFO")
    cache = replace(TINY.cache, kv_cache_memory_bytes=None)
    scheduler = replace(TINY.scheduler, max_num_batched_tokens=9)
    config = replace(TINY, model=model, cache=cache, scheduler=scheduler, max_model_len=600)
    meter = Meter(held=3 * 2**28)
    engine = build_engine(config, memory_of=lambda _: meter)
    assert meter.num_runs == 1
    stats = engine.stats()
    pages = stats.num_pages * stats.page_bytes
    left = int(2**30 * 0.9) - 3 * 2**28 - 2**27
    assert left / 3 < pages < left  # of what is left a V4 keeps a fifth for snapshots
    assert "memory: 1.0 GiB, of which 0.8 are in use" in caplog.text
    wanted = generate(build_engine(replace(config, cache=TINY.cache)), [[3, 4, 5]], 4)
    assert generate(engine, [[3, 4, 5]], 4) == wanted
    meter = Meter(held=2**30)
    with pytest.raises(ConfigError, match="leaves no memory for the cache"):
        build_engine(config, memory_of=lambda _: meter)


def test_kernels_that_the_measured_step_compiles_and_tunes_are_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    caplog.set_level("INFO")
    step = Rehearsal.step

    def tuning(self: Rehearsal) -> None:
        preparation.add_tuned(1.5)
        step(self)

    monkeypatch.setattr(Rehearsal, "step", tuning)
    cache = replace(TINY.cache, kv_cache_memory_bytes=None)
    config = replace(TINY, cache=cache, max_model_len=600)
    build_engine(config, memory_of=lambda _: Meter())
    assert "2 tuned (in 3.0 s)" in caplog.text


def test_a_setting_by_hand_measures_nothing() -> None:
    meter = Meter()
    build_engine(TINY, memory_of=lambda _: meter)
    assert meter.num_runs == 0
