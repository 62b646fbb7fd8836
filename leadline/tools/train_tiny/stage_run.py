"""A stage from start to end: the loop around the trainer, with log, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from leadline.core.errors import LeadlineError
from leadline.tools.train_tiny.batch import Batch
from leadline.tools.train_tiny.clock import Clock
from leadline.tools.train_tiny.journal import Journal
from leadline.tools.train_tiny.model import Phase
from leadline.tools.train_tiny.recipes import Recipe, Stage
from leadline.tools.train_tiny.replicas import Replicas
from leadline.tools.train_tiny.trainer import Trainer


class TrainingDiverged(LeadlineError):
    """No step gives finite gradients any more."""


class StageRun:
    """One stage.

    Args:
        trainer: takes the steps.
        recipe: how often to log and to evaluate.
        stage: of the recipe.
        held_out: family -> a batch of the stage's shape on the model's device.
        clock: of the stage.
        journal: gets the log.
        checkpoint: saves the model; called after every evaluation.
        replicas: those whose decisions must be the same.
    """

    def __init__(
        self,
        trainer: Trainer,
        recipe: Recipe,
        stage: Stage,
        held_out: Mapping[str, Batch],
        *,
        clock: Clock,
        journal: Journal,
        checkpoint: Callable[[], None],
        replicas: Replicas,
    ) -> None:
        self._trainer, self._recipe, self._stage = trainer, recipe, stage
        self._held_out, self._checkpoint = held_out, checkpoint
        self._clock, self._journal, self._replicas = clock, journal, replicas
        self._phase = Phase()
        self._logged = self._evaluated = (0, clock.seconds)  # step, when
        self._logged_tokens = 0

    def run(self, batches: Iterator[Batch]) -> None:
        """Train until the clock says so; ends with an evaluation and a checkpoint.

        Args:
            batches: endless, of the stage's shape.

        Raises:
            TrainingDiverged: after a checkpoint of the last good weights.
        """
        trainer, stage = self._trainer, self._stage
        per_pass = stage.micro_tokens * self._replicas.size
        while (progress := self._replicas.agree(self._clock.progress(trainer.steps))) < 1:
            self._phase = stage.phase(progress, trainer.steps)
            trainer.step(
                batches,
                self._phase,
                passes=max(1, stage.tokens(progress) // per_pass),
                lr_factor=stage.lr_factor(progress),
            )
            if trainer.steps % self._recipe.log_steps == 0:
                self._log(progress)
            waited = self._replicas.agree(self._clock.seconds - self._evaluated[1])
            if waited >= self._recipe.validate_seconds:
                self._evaluate()
        if self._evaluated[0] < trainer.steps:
            self._evaluate()

    def _log(self, progress: float) -> None:
        figures = self._trainer.read_figures()  # waits for the device, so the time is true
        (step, since), now = self._logged, self._clock.seconds
        num_tokens = self._trainer.tokens - self._logged_tokens
        self._journal.write(
            "train",
            step=self._trainer.steps,
            seconds=now,
            progress=progress,
            tokens=self._trainer.tokens,
            tokens_per_second=num_tokens / (now - since),
            sparse=self._phase.sparse,
            quantize=self._phase.quantize,
            gpu_gib=torch.cuda.max_memory_allocated() / 2**30,
            **figures,
        )
        self._logged, self._logged_tokens = (self._trainer.steps, now), self._trainer.tokens
        if figures["skipped"] == self._trainer.steps - step:
            self._checkpoint()
            raise TrainingDiverged(
                f"no step from {step + 1} to {self._trainer.steps} had finite gradients; the last "
                "good weights are saved; go on from them with a lower muon_lr and adamw_lr"
            )

    def _evaluate(self) -> None:
        began = self._clock.seconds
        losses = self._trainer.evaluate(self._held_out, self._phase)
        self._checkpoint()
        now = self._clock.seconds
        self._clock.paused(now - began)
        self._journal.write(
            "validation",
            step=self._trainer.steps,
            seconds=now,
            tokens=self._trainer.tokens,
            losses=losses,
        )
        self._evaluated = (self._trainer.steps, now)
        # Throughput is that of training alone.
        self._logged = (self._logged[0], self._logged[1] + now - began)
