"""The commands ``draft`` and ``export``, on a backbone with random weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leadline.config.model import load_model_config
from leadline.tools.train_tiny import __main__ as command
from leadline.tools.train_tiny import official
from leadline.tools.train_tiny.checkpoints import Progress, read_progress, save_weights
from leadline.tools.train_tiny.data import build_small
from leadline.tools.train_tiny.journal import read_journal
from leadline.tools.train_tiny.model import Transformer
from leadline.tools.train_tiny.recipes import RECIPES, REHEARSAL
from leadline.tools.train_tiny.runs import fitted
from leadline.tools.train_tiny.whole import load_whole

_PROSE = sorted((Path(__file__).parents[3] / "docs").glob("*.md"))
_SHORT = [
    "max_steps=3",
    "log_steps=1",
    "warmup_steps=1",
    "seq_len=128",
    "micro_tokens=128",
    "mixture.recall=0",
]
_SHORT += [
    "quantize_from=0.5",
    "tokens_per_step=128",
    "early_tokens=128",
    "mixture.arithmetic_drill=0",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    build_small(folder, _PROSE, REHEARSAL.config)
    (folder / "NOTICE").write_text("Whose texts these are.\n")
    return folder


@pytest.fixture(scope="module")
def backbone(data: Path) -> Path:
    torch.manual_seed(0)
    config, token_map = fitted(REHEARSAL.config, data)
    folder = data.parent / "backbone"
    progress = Progress("rehearsal", stage=3, steps=9)
    specs = official.parameter_formats(config)
    save_weights(folder, Transformer(config, token_map), specs, progress)
    return folder


@pytest.fixture(scope="module")
def trained(data: Path, backbone: Path) -> Path:
    out = data.parent / "draft"
    run_draft(data, backbone, out, _SHORT)
    return out


def run_draft(data: Path, start: Path, out: Path, settings: Sequence[str]) -> None:
    changes = [f"--set={setting}" for setting in settings]
    arguments = ["draft", f"--data={data}", f"--from={start}", f"--out={out}", *changes]
    assert command.main(arguments) == 0


def run_export(data: Path, start: Path, out: Path) -> int:
    return command.main(["export", f"--data={data}", f"--from={start}", f"--out={out}"])


def test_training_a_head_logs_its_acceptance_by_family_and_slot(trained: Path) -> None:
    lines = read_journal(trained / "log.jsonl")
    assert [line["kind"] for line in lines] == ["start", *["train"] * 3, "validation"]
    assert [line["quantize"] for line in lines if line["kind"] == "train"] == [False] * 2 + [True]
    told = json.loads((trained / "acceptance.json").read_text())
    assert set(told["families"]) == set(lines[-1]["losses"]) == {"prose", "recall_dense"}
    for figures in told["families"].values():
        assert figures["blocks"] > 0
        assert 0 <= figures["length"] <= REHEARSAL.config.dspark_block_size
        assert len(figures["by_slot"]) == REHEARSAL.config.dspark_block_size


def test_training_a_head_rounds_the_backbone_and_changes_it_no_further(
    data: Path, backbone: Path, trained: Path
) -> None:
    before, after = load_whole(backbone, data), load_whole(trained / "weights", data)
    specs = official.parameter_formats(before.config)
    for name, value in before.backbone.state_dict().items():
        expected = official.round_weight(value, specs[name])
        assert torch.equal(after.backbone.state_dict()[name], expected), name
    assert after.progress == Progress(
        "rehearsal", stage=4, steps=12, tokens=3 * 128, is_quantized=True, has_draft=True
    )


def test_a_head_can_be_trained_on(data: Path, trained: Path, tmp_path: Path) -> None:
    run_draft(data, trained / "weights", tmp_path, [*_SHORT, "max_steps=1", "adamw_lr=1e-9"])
    first, then = load_whole(trained / "weights", data), load_whole(tmp_path / "weights", data)
    norm = "mtp.1.norm.weight"  # AdamW's
    assert torch.equal(first.draft.state_dict()[norm], then.draft.state_dict()[norm])
    assert then.progress.steps == 13


def test_a_checkpoint_holds_what_was_trained(data: Path, trained: Path, tmp_path: Path) -> None:
    assert run_export(data, trained / "weights", tmp_path / "model") == 0
    whole = load_whole(trained / "weights", data)
    assert load_model_config(tmp_path / "model") == whole.config
    found = official.read(tmp_path / "model", whole.config)
    expected = whole.module().state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    files = {file.name for file in (tmp_path / "model").iterdir()}
    assert files == {
        "NOTICE",
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    }
    tokenizer = (tmp_path / "model" / "tokenizer.json").read_text()
    assert tokenizer == (data / "tokenizer.json").read_text()


def test_a_head_that_was_not_trained_is_random_and_said_to_be(
    data: Path, backbone: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert run_export(data, backbone, tmp_path / "model") == 0
    assert "no trained draft head" in caplog.text
    config = load_model_config(tmp_path / "model")
    found = official.read(tmp_path / "model", config)
    assert found["mtp.0.main_proj.weight"].std() > 0


def test_a_model_without_draft_stages_is_exported_but_has_no_head_to_train(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = REHEARSAL.config
    ratios = shape.compress_ratios[: shape.num_hidden_layers]
    shape = replace(shape, num_nextn_predict_layers=0, compress_ratios=ratios)
    monkeypatch.setitem(RECIPES, "rehearsal", replace(REHEARSAL, config=shape))
    config, token_map = fitted(shape, data)
    weights = tmp_path / "weights"
    specs = official.parameter_formats(config)
    save_weights(weights, Transformer(config, token_map), specs, Progress("rehearsal"))
    assert run_export(data, weights, tmp_path / "model") == 0
    assert caplog.text == ""
    arguments = [f"--data={data}", f"--from={weights}", f"--out={tmp_path / 'draft'}"]
    assert command.main(["draft", *arguments]) == 1
    assert "num_nextn_predict_layers is 0" in capsys.readouterr().err


def test_weights_of_an_unknown_recipe_are_refused(
    data: Path,
    backbone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert read_progress(backbone).recipe == "rehearsal"
    monkeypatch.delitem(RECIPES, "rehearsal")
    assert run_export(data, backbone, tmp_path / "model") == 1
    assert "of recipe 'rehearsal'; this version knows h200" in capsys.readouterr().err
