"""What outlives a stage: weights that travel, and the whole state for the next on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from leadline.core.errors import CheckpointError
from leadline.tools.train_tiny.trainer import Trainer
from leadline.weights.table import WeightSpec

STATE_FILE = "state.json"
# A bound on what some machines let through: 16 MiB a file.
_PART_BYTES = 15 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training has come.

    Attributes:
        recipe: its name.
        stage: the last that was worked on, from 1.
        steps: optimiser steps, over all stages.
        tokens: read, over all stages.
        is_quantized: the weights went through their export format already.
        has_draft: the weights are a backbone's and its draft head's.
    """

    recipe: str
    stage: int = 0
    steps: int = 0
    tokens: int = 0
    is_quantized: bool = False
    has_draft: bool = False


def save_weights(
    folder: Path, model: nn.Module, specs: Mapping[str, WeightSpec], progress: Progress
) -> None:
    """Write what the model computes with, bf16 where the official format needs no more.

    Quantised values are exact in bf16, so after quantisation-aware training these files hold the
    very model that was trained. ``folder`` is replaced when the new one is whole.

    Args:
        folder: gets ``part-N.safetensors`` below 15 MiB each, experts stacked, and
            ``state.json``.
        model: its parameters and its buffers that are weights.
        specs: ``official.parameter_formats`` of the configuration.
        progress: to be read again by ``load_weights``.
    """
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in model.state_dict().items():
        dtype = torch.float32 if specs[name].dtype == "F32" else torch.bfloat16
        stored = value.detach().to("cpu", dtype).contiguous()
        if size + stored.nbytes > _PART_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = stored
        size += stored.nbytes
    with _replacing(folder) as new:
        for number, part in enumerate(parts, start=1):
            save_file(part, new / f"part-{number}.safetensors")
        (new / STATE_FILE).write_text(json.dumps(asdict(progress), indent=1) + "\n")


def load_weights(folder: Path, model: nn.Module) -> Progress:
    """Read what ``save_weights`` wrote.

    Raises:
        CheckpointError: files are missing, or are those of another model.
    """
    progress = read_progress(folder)
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("part-*.safetensors")):
        stored |= load_file(file)
    expected = model.state_dict()
    for name in sorted(stored.keys() ^ expected.keys()):
        where = "the recipe's model" if name in stored else "the files"
        raise CheckpointError(f"{folder}: weight {name} is missing in {where}; another recipe's?")
    for name, value in expected.items():
        if stored[name].shape != value.shape:
            raise CheckpointError(
                f"{folder}: weight {name} is {list(stored[name].shape)}, the recipe's model needs "
                f"{list(value.shape)}"
            )
    model.load_state_dict(stored)
    return progress


def read_progress(folder: Path) -> Progress:
    """How far the weights that ``save_weights`` wrote had come.

    Raises:
        CheckpointError: there are none.
    """
    if not (folder / STATE_FILE).is_file():
        raise CheckpointError(
            f"{folder}: holds no training weights (part-N.safetensors and {STATE_FILE}); give the "
            "folder 'weights' that a stage wrote"
        )
    return Progress(**json.loads((folder / STATE_FILE).read_text()))


def save_state(file: Path, trainer: Trainer, progress: Progress) -> None:
    """Write masters and optimisers: what the next stage on this machine goes on from."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(file.name + ".new")
    torch.save({"progress": asdict(progress), "trainer": trainer.state_dict()}, new)
    new.replace(file)


def load_state(file: Path, trainer: Trainer) -> Progress:
    """Read what ``save_state`` wrote into a trainer of the same model.

    Raises:
        CheckpointError: it is of another model.
    """
    state = torch.load(file, map_location="cpu", weights_only=True)
    try:
        trainer.load_state_dict(state["trainer"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{file}: not of this recipe's model ({error})") from error
    return Progress(**state["progress"])


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the place of ``folder`` at the end: a kill leaves one whole."""
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
