"""Weights that travel, and the whole state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from leadline.core.errors import CheckpointError
from leadline.tools.train_tiny import checkpoints
from leadline.tools.train_tiny.checkpoints import (
    Progress,
    load_state,
    load_weights,
    save_state,
    save_weights,
)
from leadline.tools.train_tiny.model import Phase
from leadline.tools.train_tiny.recipes import REHEARSAL
from leadline.tools.train_tiny.replicas import Replicas
from leadline.tools.train_tiny.trainer import Trainer
from tests.tools.train_tiny.standin import SPECS, StandIn, batches

PROGRESS = Progress("rehearsal", stage=2, steps=30, tokens=4000, is_quantized=True)


def trained(model: StandIn, phase: Phase = Phase()) -> Trainer:
    trainer = Trainer(model, SPECS, REHEARSAL, replicas=Replicas())
    stream = batches()
    for _ in range(3):
        trainer.step(stream, phase, passes=1, lr_factor=1.0)
    return trainer


def test_weights_come_back_in_bf16_and_mixers_and_biases_in_full(tmp_path: Path) -> None:
    model, other = StandIn(), StandIn()
    trained(model)
    save_weights(tmp_path / "weights", model, SPECS, PROGRESS)
    assert load_weights(tmp_path / "weights", other) == PROGRESS
    for name, value in model.state_dict().items():
        is_full = name.endswith(("hc_attn_base", "gate.bias"))
        expected = value if is_full else value.bfloat16().float()
        assert torch.equal(other.state_dict()[name], expected), name


def test_quantised_weights_come_back_exactly(tmp_path: Path) -> None:
    model, other = StandIn(), StandIn()
    trained(model, Phase(quantize=True))
    save_weights(tmp_path / "weights", model, SPECS, PROGRESS)
    load_weights(tmp_path / "weights", other)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_parts_stay_below_their_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_PART_BYTES", 9000)
    model = StandIn()
    save_weights(tmp_path / "weights", model, SPECS, PROGRESS)
    parts = [load_file(file) for file in (tmp_path / "weights").glob("*.safetensors")]
    assert len(parts) > 1
    assert all(sum(t.nbytes for t in part.values()) <= 9000 for part in parts)
    assert {name for part in parts for name in part} == model.state_dict().keys()


def test_new_weights_replace_old_ones_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = StandIn()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_PART_BYTES", 5000)
        save_weights(tmp_path / "weights", model, SPECS, Progress("rehearsal"))
    trained(model)
    save_weights(tmp_path / "weights", model, SPECS, PROGRESS)
    assert load_weights(tmp_path / "weights", StandIn()) == PROGRESS
    assert [folder.name for folder in tmp_path.iterdir()] == ["weights"]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no training weights"):
        load_weights(tmp_path, StandIn())


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    model = StandIn()
    save_weights(tmp_path / "weights", model, SPECS, PROGRESS)
    model.head = torch.nn.Linear(32, 8, bias=False)
    with pytest.raises(CheckpointError, match=r"head.weight is \[32, 32\].* needs \[8, 32\]"):
        load_weights(tmp_path / "weights", model)
    del model.head
    with pytest.raises(CheckpointError, match="head.weight is missing in the recipe's model"):
        load_weights(tmp_path / "weights", model)


def test_a_state_goes_through_a_file(tmp_path: Path) -> None:
    file = tmp_path / "machine" / "state.pt"
    model, heir = StandIn(), StandIn()
    trainer = trained(model)
    save_state(file, trainer, PROGRESS)
    successor = Trainer(heir, SPECS, REHEARSAL, replicas=Replicas())
    assert load_state(file, successor) == PROGRESS
    batch = next(batches())
    for one in (trainer, successor):
        torch.manual_seed(1)  # of the stand-in's routing
        one._warmup_steps = 0
        one.step(iter([batch]), Phase(), passes=1, lr_factor=1.0)
    for name, value in model.state_dict().items():
        assert torch.equal(heir.state_dict()[name], value), name


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path / "state.pt", trained(StandIn()), PROGRESS)
    other = StandIn()
    other.head = torch.nn.Linear(32, 8, bias=False)
    with pytest.raises(CheckpointError, match="not of this recipe's model"):
        load_state(tmp_path / "state.pt", Trainer(other, SPECS, REHEARSAL, replicas=Replicas()))
