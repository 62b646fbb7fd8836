"""The loop of a stage: switching, logging, evaluating, ending."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leadline.tools.train_tiny.clock import Clock
from leadline.tools.train_tiny.journal import Journal, read_journal
from leadline.tools.train_tiny.model import Phase
from leadline.tools.train_tiny.recipes import REHEARSAL, Stage
from leadline.tools.train_tiny.replicas import Replicas
from leadline.tools.train_tiny.stage_run import StageRun, TrainingDiverged
from leadline.tools.train_tiny.trainer import Trainer
from tests.tools.train_tiny.standin import LENGTH, ROWS, SPECS, StandIn, batches

PASS = ROWS * LENGTH
STAGE = replace(
    REHEARSAL.stages[0],
    seconds=100.0,
    max_steps=math.inf,
    seq_len=LENGTH,
    micro_tokens=PASS,
    tokens_per_step=2 * PASS,
    early_tokens=PASS,
)
RECIPE = REHEARSAL.changed(["log_steps=5", "validate_seconds=20"])


class Run:
    """A stage over the stand-in, on a clock that every pass of the model moves on."""

    def __init__(self, file: Path, stage: Stage, *, pass_seconds: float = 1.0) -> None:
        self.time, self.saved = 0.0, []
        self.model = StandIn()

        def moves_on(*_: Any) -> None:
            self.time += pass_seconds

        self.model.register_forward_pre_hook(moves_on)
        self.trainer = Trainer(self.model, SPECS, RECIPE, replicas=Replicas())
        self.file = file / "log.jsonl"
        clock = Clock(stage, 0.0, now=lambda: self.time)
        self.loop = StageRun(
            self.trainer,
            RECIPE,
            stage,
            {"prose": next(batches())},
            clock=clock,
            journal=Journal(self.file, stage=1),
            checkpoint=lambda: self.saved.append(self.trainer.steps),
            replicas=Replicas(),
        )

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in read_journal(self.file) if entry["kind"] == kind]


def test_a_stage_ends_within_its_seconds_with_a_checkpoint_of_its_last_step(tmp_path: Path) -> None:
    run = Run(tmp_path, STAGE)
    run.loop.run(batches())
    assert 90 < run.time <= 100
    assert run.saved[-1] == run.trainer.steps
    assert run.entries("validation")[-1]["step"] == run.trainer.steps


def test_evaluations_and_checkpoints_come_at_their_interval(tmp_path: Path) -> None:
    run = Run(tmp_path, STAGE)
    run.loop.run(batches())
    seconds = [entry["seconds"] for entry in run.entries("validation")]
    assert len(seconds) == len(run.saved) == 5
    assert all(20 <= after - before <= 24 for before, after in zip(seconds, seconds[1:-1]))


def test_a_stage_ends_after_its_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, replace(STAGE, max_steps=7))
    run.loop.run(batches())
    assert run.trainer.steps == 7
    assert run.saved == [7]


def test_phases_follow_one_another_and_the_evaluation_is_of_the_last(tmp_path: Path) -> None:
    stage = replace(STAGE, max_steps=10, sparse_from=0.4, quantize_from=0.8, index_from=2)
    run = Run(tmp_path, replace(stage, tokens_per_step=PASS))
    run.loop.run(batches())
    dense, sparse = Phase(), Phase(sparse=True)
    last = Phase(sparse=True, quantize=True)
    early = replace(dense, index_loss=False)
    assert run.model.phases == [early] * 2 + [dense] * 2 + [sparse] * 4 + [last] * 3
    assert run.trainer.is_quantized


def test_steps_grow_after_the_early_part(tmp_path: Path) -> None:
    run = Run(tmp_path, replace(STAGE, max_steps=10, early_until=0.5))
    run.loop.run(batches())
    assert run.trainer.tokens == (5 + 2 * 5) * PASS


def test_a_line_of_the_log_says_how_fast_training_is_without_evaluations(tmp_path: Path) -> None:
    run = Run(tmp_path, STAGE)
    run.loop.run(batches())
    lines = run.entries("train")
    assert [line["step"] for line in lines] == list(range(5, 5 * len(lines) + 1, 5))
    for line in lines:
        assert line["tokens_per_second"] == pytest.approx(PASS)
        assert {"loss", "lr", "index_loss", "max_expert_share", "gpu_gib"} <= line.keys()
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_training_that_diverges_stops_with_its_last_good_weights_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, STAGE)
    with pytest.raises(TrainingDiverged, match="no step from 1 to 5 had finite gradients"):
        run.loop.run(batches(poison=True))
    assert run.saved == [5]
    assert all(value.isfinite().all() for value in run.model.state_dict().values())
