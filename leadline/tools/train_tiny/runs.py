"""A stage of a recipe as a whole: model and data from folders, trained, saved into folders."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from leadline.config.model import ModelConfig
from leadline.core.errors import ConfigError
from leadline.models.deepseek_v41.engram import compressed_token_map
from leadline.tools.train_tiny.batch import Batch
from leadline.tools.train_tiny.batches import BatchLoader, heldout_batches
from leadline.tools.train_tiny.checkpoints import (
    Progress,
    load_state,
    save_state,
    save_weights,
)
from leadline.tools.train_tiny.clock import Clock
from leadline.tools.train_tiny.data import model_config
from leadline.tools.train_tiny.journal import Journal
from leadline.tools.train_tiny.mixture import Stream
from leadline.tools.train_tiny.model import Transformer
from leadline.tools.train_tiny.official import parameter_formats
from leadline.tools.train_tiny.recipes import Recipe
from leadline.tools.train_tiny.replicas import Replicas, joined
from leadline.tools.train_tiny.stage_run import StageRun
from leadline.tools.train_tiny.starts import load_start
from leadline.tools.train_tiny.trainer import Trainer

WEIGHTS = "weights"  # a folder in a run's output
LOG_FILE = "log.jsonl"
_MOST_STAGES, _MOST_REPLICAS = 64, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a run reads, computes and writes.

    Attributes:
        data: the folder that ``data`` wrote.
        out: gets ``weights/`` and ``log.jsonl``.
        start: a ``weights`` folder to go on from, or a checkpoint in the official layout; None
            begins with random weights.
        state: file of the whole state, optimiser included. If it is there it is gone on from, and
            not from ``start``; it is written at the end. None leaves it out.
        device: what computes.
        workers: processes that make batches, per replica; 0 is a thread.
    """

    data: Path
    out: Path
    start: Path | None = None
    state: Path | None = None
    device: torch.device
    workers: int = 0


def train_stage(recipe: Recipe, number: int, places: Places, *, started: float) -> None:
    """Train stage ``number`` of a recipe, within its seconds from ``started``.

    Args:
        recipe: its configuration is fitted to the data's tokenizer.
        number: of the stage, from 1.
        places: folders and devices.
        started: ``time.monotonic()`` when the command began.

    Raises:
        ConfigError: the recipe and the data do not fit.
        CheckpointError: what is to be gone on from is not of this recipe's model.
        TrainingDiverged: the weights before it are saved.
    """
    config, token_map = fitted(recipe.config, places.data)
    specs = parameter_formats(config)
    with joined(places.device) as (replicas, device):
        on_gpu = device.type == "cuda"
        torch.manual_seed(recipe.seed)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model = Transformer(config, token_map, dtype=dtype, fused=on_gpu)
        before = Progress(recipe.name)
        state = places.state if places.state is not None and places.state.exists() else None
        if state is None and places.start is not None:
            before = load_start(places.start, model, config, places.data, recipe.name)
        trainer = Trainer(model.to(device), specs, recipe, replicas=replicas)
        if state is not None:
            before = load_state(state, trainer)

        def save(progress: Progress) -> None:
            save_weights(places.out / WEIGHTS, model, specs, progress)

        progress, _ = run_stage(
            trainer,
            config,
            recipe,
            number,
            places,
            before=before,
            save=save,
            replicas=replicas,
            started=started,
        )
        if places.state is not None and replicas.rank == 0:
            save_state(places.state, trainer, progress)


def run_stage(
    trainer: Trainer,
    config: ModelConfig,
    recipe: Recipe,
    number: int,
    places: Places,
    *,
    before: Progress,
    save: Callable[[Progress], None],
    replicas: Replicas,
    started: float,
) -> tuple[Progress, dict[str, Batch]]:
    """Feed a trainer the batches of stage ``number`` of a recipe, with log and checkpoints.

    Args:
        trainer: of this replica.
        config: of the model.
        recipe: has the stage.
        number: see there.
        places: the data, and where the log goes.
        before: what the trainer goes on from.
        save: writes the weights; called by the first replica.
        replicas: those who train the same model on other rows.
        started: ``time.monotonic()`` when the command began.

    Returns:
        How far training has come, and the batch of each family that it was evaluated on.
    """
    stage = recipe.stage(number)

    def progress() -> Progress:
        return Progress(
            recipe=recipe.name,
            stage=number,
            steps=before.steps + trainer.steps,
            tokens=before.tokens + trainer.tokens,
            is_quantized=trainer.is_quantized,
        )

    def checkpoint() -> None:
        if replicas.rank == 0:
            save(progress())

    stream = Stream(
        folder=places.data,
        mixture=stage.mixture,
        rows=stage.rows,
        length=stage.seq_len,
        # Another one for every stage, wherever a run begins, and for every replica.
        seed=((recipe.seed + before.steps) * _MOST_STAGES + number) * _MOST_REPLICAS
        + replicas.rank,
        alignment=math.lcm(*filter(None, config.compress_ratios)),
    )
    device = trainer.device
    on_gpu = device.type == "cuda"
    journal = Journal(places.out / LOG_FILE if replicas.rank == 0 else None, stage=number)
    with BatchLoader(stream, workers=places.workers, pin_memory=on_gpu) as batches:
        journal.write(
            "start",
            seconds=time.monotonic() - started,
            recipe=recipe.name,
            settings=recipe.settings(stage),
            parameters=trainer.num_parameters,
            replicas=replicas.size,
            device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
            before=asdict(before),
        )
        found = heldout_batches(stream, 1)
        held_out = {family: rows[0].to(device) for family, rows in found.items()}
        StageRun(
            trainer,
            recipe,
            stage,
            held_out,
            clock=Clock(stage, started),
            journal=journal,
            checkpoint=checkpoint,
            replicas=replicas,
        ).run(batches)
    return progress(), held_out


def fitted(config: ModelConfig, data: Path) -> tuple[ModelConfig, list[int]]:
    """A configuration made to fit the tokenizer of a data folder, and the n-gram class map.

    Raises:
        ConfigError: there is no tokenizer.
    """
    file = data / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{file}: not found; make the folder with the command 'data' first")
    tokenizer = Tokenizer.from_file(str(file))
    return model_config(config, tokenizer), compressed_token_map(tokenizer)
