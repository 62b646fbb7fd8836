"""Training that goes on from a checkpoint in the official layout."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leadline.config.model import load_model_config
from leadline.config.presets import TINY_22M
from leadline.core.errors import CheckpointError
from leadline.tools.random_checkpoint import write_random_checkpoint
from leadline.tools.train_tiny import __main__ as command
from leadline.tools.train_tiny import official
from leadline.tools.train_tiny.checkpoints import Progress, read_progress
from leadline.tools.train_tiny.data import build_small
from leadline.tools.train_tiny.export import export_checkpoint
from leadline.tools.train_tiny.model import Transformer
from leadline.tools.train_tiny.recipes import REHEARSAL
from leadline.tools.train_tiny.runs import fitted
from leadline.tools.train_tiny.starts import load_start
from leadline.tools.train_tiny.whole import load_whole

_PROSE = [Path(__file__).parents[3] / "ARCHITECTURE.md"]
_SHORT = ["max_steps=1", "seq_len=128", "micro_tokens=128", "tokens_per_step=128"]
_SHORT += ["early_tokens=128", "mixture.recall=0", "mixture.arithmetic_drill=0"]


@pytest.fixture(scope="module")
def checkpoint(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "checkpoint"
    config, _ = fitted(REHEARSAL.config, data_folder)
    write_random_checkpoint(folder, config, tokenizer=data_folder / "tokenizer.json", num_shards=2)
    return folder


def backbone(data: Path) -> Transformer:
    config, token_map = fitted(REHEARSAL.config, data)
    return Transformer(config, token_map)


def test_a_model_starts_from_the_exact_values_biases_of_the_router_included(
    data_folder: Path, checkpoint: Path
) -> None:
    model = backbone(data_folder)
    config = model.config
    progress = load_start(checkpoint, model, config, data_folder, "rehearsal")
    assert progress == Progress("rehearsal", is_quantized=True)
    values, loaded = official.read(checkpoint, config), model.state_dict()
    assert any(name.endswith("gate.bias") for name in loaded)
    for name, value in loaded.items():
        assert torch.equal(value, values[name]), name


def test_a_stage_goes_on_from_a_checkpoint(
    data_folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    arguments = ["train", "--recipe=rehearsal", "--stage=3", f"--data={data_folder}"]
    arguments += [f"--from={checkpoint}", f"--out={tmp_path}"]
    arguments += [f"--set={setting}" for setting in (*_SHORT, "muon_lr=0", "adamw_lr=0")]
    assert command.main(arguments) == 0
    assert read_progress(tmp_path / "weights").stage == 3
    trained = load_whole(tmp_path / "weights", data_folder).backbone.state_dict()
    values = official.read(checkpoint, fitted(REHEARSAL.config, data_folder)[0])
    for name, value in trained.items():  # nothing is learnt at a rate of zero
        assert torch.equal(value, values[name]), name


def test_an_export_exported_again_is_the_same_files_and_has_the_notice(
    data_folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(data_folder, data)
    (data / "NOTICE").write_text("Whose texts they are.")
    assert load_whole(checkpoint, data).progress.has_draft
    once, twice = tmp_path / "once", tmp_path / "twice"
    export_checkpoint(checkpoint, data, once)  # random codes are not those that rounding gives
    export_checkpoint(once, data, twice)
    for file in once.iterdir():
        assert file.read_bytes() == (twice / file.name).read_bytes(), file.name
    assert (twice / "NOTICE").read_text() == "Whose texts they are."


def test_another_tokenizer_is_refused(data_folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "data"
    build_small(other, _PROSE, REHEARSAL.config)
    model = backbone(data_folder)
    with pytest.raises(CheckpointError, match=r"differs from .* 'data --tokenizer "):
        load_start(checkpoint, model, model.config, other, "rehearsal")
    with pytest.raises(CheckpointError, match="differs from"):
        load_whole(checkpoint, other)
    (other / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"data/tokenizer\.json: not found"):
        load_whole(checkpoint, other)


def test_another_model_is_refused(data_folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    model = backbone(data_folder)
    config = replace(model.config, sliding_window=8)
    with pytest.raises(CheckpointError, match=r"sliding_window is 16 .* needs 8"):
        load_start(checkpoint, model, config, data_folder, "rehearsal")
    changed = tmp_path / "changed"
    shutil.copytree(checkpoint, changed)
    text = (changed / "config.json").read_text()
    (changed / "config.json").write_text(
        text.replace('"sliding_window": 16', '"sliding_window": 8')
    )
    with pytest.raises(CheckpointError, match="that of no recipe's model; there are h200, rehears"):
        load_whole(changed, data_folder)


def test_data_can_be_built_with_the_tokenizer_of_a_checkpoint(
    data_folder: Path, tmp_path: Path
) -> None:
    kept = data_folder / "tokenizer.json"
    arguments = ["data", str(tmp_path), "--texts", str(_PROSE[0]), f"--tokenizer={kept}"]
    assert command.main(arguments) == 0
    assert (tmp_path / "tokenizer.json").read_bytes() == kept.read_bytes()
    config = load_model_config(tmp_path)
    assert config == fitted(replace(TINY_22M, vocab_size=1024), tmp_path)[0]
